"""Pictures of runs: what is drawn (`series`, `timeline`: pure), how it is drawn (`style`, `figure`), and a page that needs nothing else (`page`)."""
