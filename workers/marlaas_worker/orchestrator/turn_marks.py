"""Where in the stream TURNS the turns of open groups and of the evaluation begin; older turns may be purged."""

from collections.abc import Collection, Iterable


class TurnMarks:
    """Sequences of TURNS before which nothing of a group was recorded, by its index.

    Attributes:
        evaluation: the same for the evaluation in progress.
    """

    def __init__(self, groups: Iterable[tuple[int, int]] = (), evaluation: int = 1) -> None:
        self._groups = dict(groups)
        self.evaluation = evaluation

    def issue(self, indices: Iterable[int], last_sequence: int) -> None:
        """Note groups that are about to be issued. last_sequence: of TURNS, as of now or earlier."""
        self._groups |= dict.fromkeys(indices, last_sequence + 1)

    def forget(self, indices: Collection[int]) -> None:
        """Forget groups whose step is on record."""
        self._groups = {index: first for index, first in self._groups.items() if index not in indices}

    def first(self, indices: Iterable[int]) -> tuple[int, ...]:
        """Return the mark of each group; 1 if it is not known."""
        return tuple(self._groups.get(index, 1) for index in indices)
