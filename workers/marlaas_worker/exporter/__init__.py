"""Role exporter: sends one job's steps and evaluations to its trackers, messages to its webhooks, and its adapters to hub, bucket and volume."""
