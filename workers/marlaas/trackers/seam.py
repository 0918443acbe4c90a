"""Interface to trackers, its fake, and the package that each tracker needs."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Protocol

from marlaas.trackers.rows import MetricRow
from marlaas_api.errors import InvalidInput
from marlaas_api.kinds.training import Tracker as Name
from marlaas_api.messages import JobDocument

_PACKAGES: dict[Name, str] = {"tensorboard": "tensorboard", "wandb": "wandb", "mlflow": "mlflow-skinny"}
_GATEWAYS: dict[Name, str] = {
    "tensorboard": "marlaas.trackers.tensorboard_gateway",
    "wandb": "marlaas.trackers.wandb_gateway",
    "mlflow": "marlaas.trackers.mlflow_gateway",
}


class Tracker(Protocol):
    """One job's run in one tracker. Called from one thread. Exceptions of the library are not caught."""

    @property
    def where(self) -> str:
        """Where to view it, as text for users."""
        ...

    def log(self, number: int, row: MetricRow) -> None:
        """Deliver one row. `number` counts the job's rows from 0, also across restarts."""
        ...

    def close(self, *, finished: bool) -> None:
        """Flush and close. `finished`: the job will send no more rows."""
        ...


Open = Callable[[Name, JobDocument, Path], Tracker]
"""Open or resume a job's run in a tracker, which may keep its files in the folder."""


@dataclass(slots=True)
class MemoryTracker:
    """Fake tracker that keeps its rows. The call with number `fails_at` raises OSError."""

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
    """Open a job's run in a real tracker. Raises the library's exceptions."""
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
