"""What one program may use."""

from dataclasses import dataclass

_SLEEP_FACTOR = 4


@dataclass(frozen=True, slots=True)
class Limits:
    """What one program may use.

    cpu_s: processor time, whole seconds; this is the limit that does not depend on how busy the machine is.
    wall_s: time on the clock, generous (None: four times `cpu_s`), for a program that sleeps or waits.
    memory_bytes: address space, the interpreter's 30 MiB included.
    file_bytes, scratch_bytes: largest file, and all files of the scratch folder together.
    output_bytes: what it may print before it is stopped.
    """

    cpu_s: int = 5
    wall_s: float | None = None
    memory_bytes: int = 256 << 20
    file_bytes: int = 1 << 20
    scratch_bytes: int = 8 << 20
    output_bytes: int = 256 << 10

    @property
    def clock_s(self) -> float:
        """Seconds on the clock."""
        return self.cpu_s * _SLEEP_FACTOR if self.wall_s is None else self.wall_s
