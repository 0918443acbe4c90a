"""Measurements for a GPU that is available for half an hour: `python -m bench.gpu NAME --shape 8b --device cuda`. See README.md."""
