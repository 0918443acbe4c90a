"""Role exporter: reports one job's steps and evaluations to its trackers, its adapters to the hub, and messages about it to its webhooks."""
