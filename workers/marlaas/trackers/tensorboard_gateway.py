"""Gateway to TensorBoard's own writer: event files in the job's folder, for `tensorboard --logdir DIR`."""

import shlex
from collections.abc import Sequence
from pathlib import Path
from textwrap import indent
from typing import Any

import numpy as np
from tensorboard.compat.proto import event_pb2, summary_pb2  # type: ignore[import-untyped]
from tensorboard.summary.writer.event_file_writer import EventFileWriter  # type: ignore[import-untyped]
from tensorboard.util.tensor_util import make_tensor_proto  # type: ignore[import-untyped]

from marlaas.trackers.seam import DATA, End, MetricRow, settings
from marlaas_api.messages import JobDocument

_SETTINGS, _SAMPLES = "settings", "samples"
_SCALARS = summary_pb2.SummaryMetadata(data_class=summary_pb2.DATA_CLASS_SCALAR)
_SCALARS.plugin_data.plugin_name = "scalars"
_TEXTS = summary_pb2.SummaryMetadata(data_class=summary_pb2.DATA_CLASS_TENSOR)
_TEXTS.plugin_data.plugin_name = "text"
_CODE = "    "
"""Begins a line of code in Markdown: nothing in the texts of prompts and replies is markup then."""


class TensorBoardTracker:
    """Writer of an event file. Every process adds its own file; TensorBoard shows them as one run."""

    def __init__(self, folder: Path, document: JobDocument) -> None:
        self._folder = folder
        self._settings = settings(document)
        self._writer = EventFileWriter(str(folder))
        self._data_digest = ""

    @property
    def where(self) -> str:
        return f"tensorboard --logdir {shlex.quote(str(self._folder))}"

    def log(self, number: int, row: MetricRow) -> None:
        if number == 0 or row.data_digest not in ("", self._data_digest):
            self._data_digest = row.data_digest
            given = self._settings | ({DATA: row.data_digest} if row.data_digest else {})
            self._add_table(_SETTINGS, [["setting", "value"], *map(list, given.items())], row)
        if row.samples:
            columns, samples = row.table
            self._add_table(_SAMPLES, [columns, *samples], row)
        for name, value in row.values.items():
            self._add(name, np.float32(value), _SCALARS, row)
        self._writer.flush()

    def _add_table(self, tag: str, lines: Sequence[Sequence[object]], row: MetricRow) -> None:
        """Add a table of texts, whose first line has the names of the columns."""
        heads, *rest = lines
        cells = [
            [str(one) for one in heads],
            *([indent(str(one), _CODE, lambda _: True) for one in line] for line in rest),
        ]
        self._add(tag, np.array([[one.encode() for one in line] for line in cells], dtype=object), _TEXTS, row)

    def _add(self, tag: str, content: Any, metadata: summary_pb2.SummaryMetadata, row: MetricRow) -> None:
        event = event_pb2.Event(wall_time=row.at, step=row.finished)
        event.summary.value.add(tag=tag, tensor=make_tensor_proto(content), metadata=metadata)
        self._writer.add_event(event)

    def has(self, number: int, row: MetricRow) -> bool:
        return False  # nobody can be asked: the caller keeps a ledger

    def close(self, end: End | None) -> None:
        self._writer.close()


def open_tracker(document: JobDocument, folder: Path) -> TensorBoardTracker:
    """Write into the subfolder `tensorboard`."""
    return TensorBoardTracker(folder / "tensorboard", document)
