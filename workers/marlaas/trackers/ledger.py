"""What a job has told to which tracker: a file of lines, each written *before* the row is told.

So nothing is told twice, whatever is killed when; a kill between the two loses that one point of a curve, and the run's own files have it.
"""

from dataclasses import dataclass, field
from pathlib import Path


@dataclass(slots=True)
class DeliveryLedger:
    """One job's. A line that a kill cut off matches nothing."""

    path: Path
    _told: dict[str, set[str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        content = self.path.read_text() if self.path.exists() else ""
        if content and not content.endswith("\n"):
            with self.path.open("a") as file:
                file.write("\n")
        for line in content.splitlines():
            tracker, _, key = line.partition(" ")
            self._told.setdefault(tracker, set()).add(key)

    def told(self, tracker: str) -> set[str]:
        """Keys of the rows that this tracker has heard."""
        return self._told.setdefault(tracker, set())

    def mark(self, tracker: str, key: str) -> None:
        """Note, for good, that a row is about to be told."""
        with self.path.open("a") as file:
            file.write(f"{tracker} {key}\n")
        self.told(tracker).add(key)
