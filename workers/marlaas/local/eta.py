"""When a job will be done, from what its progress did while this runner watched. Pure."""

from dataclasses import dataclass

WINDOW_S = 900.0


@dataclass(frozen=True, slots=True)
class ProgressMark:
    """The number of finished steps, seen for the first time at `at` (any clock, seconds)."""

    at: float
    step: int


def advanced(marks: tuple[ProgressMark, ...], step: int, now: float) -> tuple[ProgressMark, ...]:
    """Add what was just seen; what is older than the window is forgotten, but for one mark to measure from."""
    if marks and marks[-1].step == step:
        return marks
    young = tuple(mark for mark in marks if now - mark.at <= WINDOW_S) or marks[-1:]
    return (*young, ProgressMark(now, step))


def eta_s(marks: tuple[ProgressMark, ...], steps: int, now: float) -> float | None:
    """Seconds until `steps` are finished at the pace of the marks; None while there is no pace yet.

    The first mark is where the runner came in, so a resumed job is not measured over its pause; it holds the start-up and the first
    evaluation, so it counts only until there is something better. Time since the last step that is
    longer than a step takes is counted too: a job that stands still has a growing ETA, not a frozen one.
    """
    if len(marks) < 2 or marks[-1].step >= steps:
        return None
    first, last = marks[min(1, len(marks) - 2)], marks[-1]
    pace_s = (last.at - first.at) / max(1, last.step - first.step)
    waited_s = now - last.at
    left = (steps - last.step) * pace_s
    return max(left - waited_s, (steps - last.step - 1) * pace_s) + max(0.0, waited_s - pace_s)
