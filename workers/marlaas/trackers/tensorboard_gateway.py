"""Gateway to TensorBoard's own writer: event files in the job's folder, for `tensorboard --logdir DIR`."""

import shlex
from pathlib import Path

from tensorboard.summary import Writer  # type: ignore[import-untyped]

from marlaas.trackers.seam import End, MetricRow
from marlaas_api.messages import JobDocument


class TensorBoardTracker:
    """Writer of event files. Every process adds its own file; TensorBoard shows them as one run."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._writer = Writer(str(folder))

    @property
    def where(self) -> str:
        return f"tensorboard --logdir {shlex.quote(str(self._folder))}"

    def log(self, number: int, row: MetricRow) -> None:
        for name, value in row.values.items():
            self._writer.add_scalar(name, value, row.finished, wall_time=row.at)
        self._writer.flush()

    def has(self, number: int, row: MetricRow) -> bool:
        return False  # nobody can be asked: the caller keeps a ledger

    def close(self, end: End | None) -> None:
        self._writer.close()


def open_tracker(document: JobDocument, folder: Path) -> TensorBoardTracker:
    """Write into the subfolder `tensorboard`."""
    return TensorBoardTracker(folder / "tensorboard")
