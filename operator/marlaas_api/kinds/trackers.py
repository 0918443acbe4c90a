"""Experiment trackers to which a job's metrics can be exported."""

from typing import Literal

from marlaas_api.kinds.base import Distinct

Tracker = Literal["tensorboard", "wandb", "mlflow"]
"""Names of the trackers' own libraries; which server, project and credentials is said to them as ever, by their environment variables."""

Trackers = Distinct[Tracker]
