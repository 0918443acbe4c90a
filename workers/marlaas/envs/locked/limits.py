"""Limits of one program."""

from dataclasses import dataclass

_SLEEP_FACTOR = 4


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of one program.

    cpu_s: processor time in whole seconds. Unlike `wall_s`, it does not depend on the machine's load.
    wall_s: wall-clock seconds, generous, for a program that sleeps or waits. None: four times `cpu_s`.
    memory_bytes: address space, including the interpreter's 30 MiB.
    file_bytes, scratch_bytes: largest file, and all files of the scratch folder together.
    output_bytes: printed bytes after which the program is stopped.
    """

    cpu_s: int = 5
    wall_s: float | None = None
    memory_bytes: int = 256 << 20
    file_bytes: int = 1 << 20
    scratch_bytes: int = 8 << 20
    output_bytes: int = 256 << 10

    @property
    def clock_s(self) -> float:
        """Wall-clock limit in seconds."""
        return self.cpu_s * _SLEEP_FACTOR if self.wall_s is None else self.wall_s
