"""Role exporter: reports one job's steps and evaluations to its trackers, its adapters to hub, bucket and volume, and messages about it to its webhooks."""
