"""A job's figures to experiment trackers: what is told (`rows`: pure), what was told already (`ledger`), one gateway per library, and who calls them (`desk`)."""
