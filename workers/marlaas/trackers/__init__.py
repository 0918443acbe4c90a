"""Experiment trackers: rows of metrics (`rows`: pure), delivered rows (`ledger`), a gateway per library, and delivery (`feed`)."""
