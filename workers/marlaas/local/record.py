"""Step and evaluation records: from the stream to `steps.jsonl` and `evals.jsonl`.

The files are always rewritten from the stream, so a record is in a file exactly once, however often the run was
stopped.
"""

import json
from dataclasses import dataclass, field
from typing import TypeVar

from marlaas.local.folder import OutFolder, write
from marlaas_api import subjects
from marlaas_api.bus import Bus, Stored
from marlaas_api.messages import BusMessage, EvalRecord, StepRecord
from marlaas_api.names import JobRef
from marlaas_api.wire import decode

R = TypeVar("R", StepRecord, EvalRecord)


def read_line(kind: type[R], line: bytes) -> R:
    """Parse a record that `RecordFile.write` wrote. null stands for NaN, which JSON lacks. Raises ValueError."""
    return kind.model_validate(_with_nan(json.loads(line)))


def _with_nan(value: object) -> object:
    if isinstance(value, dict):
        return {key: _with_nan(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_with_nan(item) for item in value]
    return float("nan") if value is None else value


@dataclass(slots=True)
class RecordFile:
    """Records of one job; `read` adds new ones."""

    ref: JobRef
    steps: dict[int, StepRecord] = field(default_factory=dict)
    evals: dict[int, EvalRecord] = field(default_factory=dict)
    next_sequence: int = 1

    async def read(self, bus: Bus) -> bool:
        """Read new records of the stream; return whether there were any. Raises the errors of `Bus.replay`."""
        stored: list[Stored] = []
        for subject in (subjects.step, subjects.evaluation):
            name = subject(self.ref.namespace, self.ref.name, "x", 0).rpartition(".")[0] + ".*"
            stored += await bus.replay(subjects.STEPS, name, self.next_sequence)
        for item in stored:
            self.add(decode(item.data))
            self.next_sequence = max(self.next_sequence, item.sequence + 1)
        return bool(stored)

    def add(self, message: BusMessage) -> None:
        """Add one record, unless it belongs to an earlier job of the same name."""
        if isinstance(message, StepRecord) and message.uid == self.ref.uid:
            self.steps.setdefault(message.step, message)
        elif isinstance(message, EvalRecord) and message.uid == self.ref.uid:
            self.evals.setdefault(message.version, message)

    def in_order(self) -> tuple[tuple[StepRecord, ...], tuple[EvalRecord, ...]]:
        """Return steps by number and evaluations by version."""
        return tuple(self.steps[key] for key in sorted(self.steps)), tuple(
            self.evals[key] for key in sorted(self.evals)
        )

    def write(self, folder: OutFolder) -> None:
        """Rewrite both files. Raises InvalidInput if the folder cannot be written."""
        for name, records in zip(("steps.jsonl", "evals.jsonl"), self.in_order(), strict=True):
            lines = "".join(f"{record.model_dump_json()}\n" for record in records)
            write(folder.job(self.ref) / name, lines.encode())
