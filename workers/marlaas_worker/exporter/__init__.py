"""Role exporter: reports one job's steps and evaluations to its trackers, and messages about it to its webhooks."""
