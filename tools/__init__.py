"""Generators of files that are committed: the CRDs and pages of docs/. `make crds` runs them; no product package imports them."""
