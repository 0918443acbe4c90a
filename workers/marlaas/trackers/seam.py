"""The seam to trackers, its fake, and which library each needs."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Protocol

from marlaas.trackers.rows import MetricRow
from marlaas_api.errors import InvalidInput
from marlaas_api.kinds.trackers import Tracker as Name
from marlaas_api.messages import JobDocument

_PACKAGES: dict[Name, str] = {"tensorboard": "tensorboard", "wandb": "wandb", "mlflow": "mlflow-skinny"}
_GATEWAYS: dict[Name, str] = {
    "tensorboard": "marlaas.trackers.tensorboard_gateway",
    "wandb": "marlaas.trackers.wandb_gateway",
    "mlflow": "marlaas.trackers.mlflow_gateway",
}


class Tracker(Protocol):
    """One job's place in one tracker. Calls come from one thread; whatever a library raises comes out as it is."""

    @property
    def where(self) -> str:
        """Where to look at it, in words."""
        ...

    def log(self, number: int, row: MetricRow) -> None:
        """Tell one row; `number` counts the job's rows from 0, over restarts too."""
        ...

    def close(self, *, finished: bool) -> None:
        """Bring everything to where it stays; `finished`: the job will say nothing more."""
        ...


Open = Callable[[Name, JobDocument, Path], Tracker]
"""Take up a job's place in a tracker, whose files may lie in the folder."""


@dataclass(slots=True)
class MemoryTracker:
    """The fake: keeps what it is told; `fails_at` makes the call with that number raise OSError."""

    rows: list[tuple[int, MetricRow]] = field(default_factory=list)
    closed: list[bool] = field(default_factory=list)
    fails_at: int | None = None

    @property
    def where(self) -> str:
        return "memory"

    def log(self, number: int, row: MetricRow) -> None:
        if number == self.fails_at:
            raise OSError("no route to host")
        self.rows.append((number, row))

    def close(self, *, finished: bool) -> None:
        self.closed.append(finished)


def open_tracker(name: Name, document: JobDocument, folder: Path) -> Tracker:
    """The real ones. Raises whatever the library raises."""
    tracker: Tracker = import_module(_GATEWAYS[name]).open_tracker(document, folder)
    return tracker


def require(jobs: Iterable[JobDocument]) -> None:
    """Raise InvalidInput if a job names a tracker whose library is not installed."""
    for job in jobs:
        for name in job.spec.export.trackers:
            spec = find_spec(name)
            if spec is None or spec.origin is None:
                raise InvalidInput(
                    f"job {job.ref}: spec.export.trackers asks for {name}, and {_PACKAGES[name]} is not installed: "
                    f"pip install 'marlaas[trackers]', or take {name} out"
                )
