"""Measurements for a GPU that is at hand for half an hour: `python -m bench.gpu NAME --shape 8b --device cuda`. See README.md."""
