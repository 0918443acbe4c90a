"""Experiment trackers: interface and rows of metrics (`seam`), a gateway per library, and delivery (`feed`)."""
