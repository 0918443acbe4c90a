"""Estimates of the time that a job still needs, from the times of its finished steps. Pure."""

from dataclasses import dataclass

WINDOW_S = 900.0


@dataclass(frozen=True, slots=True)
class ProgressMark:
    """The number of finished steps, first seen at `at` (any clock, seconds)."""

    at: float
    step: int


def advanced(marks: tuple[ProgressMark, ...], step: int, now: float) -> tuple[ProgressMark, ...]:
    """Add an observation. Drop marks older than the window, but keep one to measure from."""
    if marks and marks[-1].step == step:
        return marks
    young = tuple(mark for mark in marks if now - mark.at <= WINDOW_S) or marks[-1:]
    return (*young, ProgressMark(now, step))


def eta_s(marks: tuple[ProgressMark, ...], steps: int, now: float) -> float | None:
    """Return the seconds until `steps` are finished at the pace of the marks; None with fewer than two marks, or when done.

    The first mark is the runner's first observation, so a resumed job's pause is not measured. Its interval
    includes start-up and the first evaluation, so it is used only while there is no other. Time since the last step
    beyond one step's duration is added, so that the estimate of a stalled job grows.
    """
    if len(marks) < 2 or marks[-1].step >= steps:
        return None
    first, last = marks[min(1, len(marks) - 2)], marks[-1]
    pace_s = (last.at - first.at) / max(1, last.step - first.step)
    waited_s = now - last.at
    left = (steps - last.step) * pace_s
    return max(left - waited_s, (steps - last.step - 1) * pace_s) + max(0.0, waited_s - pace_s)
