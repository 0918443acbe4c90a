"""Ledger of rows delivered to each tracker: a file of lines, each written *before* its row is delivered.

So no row is delivered twice, whenever a process is killed. A kill between the two loses one point of a curve, which
the run's own files still have.
"""

from dataclasses import dataclass, field
from pathlib import Path


@dataclass(slots=True)
class DeliveryLedger:
    """Ledger of one job. A line that a kill cut off matches no row."""

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
        """Return the keys of the rows that were delivered to this tracker."""
        return self._told.setdefault(tracker, set())

    def mark(self, tracker: str, key: str) -> None:
        """Record that a row is about to be delivered."""
        with self.path.open("a") as file:
            file.write(f"{tracker} {key}\n")
        self.told(tracker).add(key)
