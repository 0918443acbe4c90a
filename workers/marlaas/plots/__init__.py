"""Plots of runs: data (`series`: pure) and drawing (`figure`)."""
