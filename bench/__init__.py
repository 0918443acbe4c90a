"""Measurements. `python -m bench` takes all of them; `python -m bench NAME` one. Ratios are of two things run side by side in one run."""
