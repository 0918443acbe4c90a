"""Plots of runs: data (`series`, `timeline`: pure), drawing (`style`, `figure`), and a self-contained page (`page`)."""
