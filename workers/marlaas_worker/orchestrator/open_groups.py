"""Groups of a job that are issued and whose step is not on record: being played, complete, or decided."""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping

from marlaas_api.messages import Episode
from marlaas_worker.orchestrator.episodes import EpisodesTooLarge, kept_bytes
from marlaas_worker.orchestrator.experience import CompleteGroup

MAX_KEPT_BYTES = 256 << 20
"""Most memory for the turns and metrics of one job's episodes until their step or evaluation is on record."""


class OpenGroups:
    """Open groups of a job by index, and where in the stream TURNS their turns begin. Turns before the first of these places may be purged.

    A group is decided when it is added to a step, whether the step trains it or not.

    Attributes:
        in_flight: indices of the groups that are issued, and not decided.
        complete: the groups in flight whose members have all ended, by index.
        decided: indices of the groups that are decided, in a step that is not on record.
        evaluation_from: a sequence number of TURNS; the evaluation in progress has no turn before it.
    """

    def __init__(self) -> None:
        self.in_flight: set[int] = set()
        self.complete: dict[int, CompleteGroup] = {}
        self.decided: set[int] = set()
        self.evaluation_from = 1
        self._turns_from: dict[int, int] = {}
        self._bytes: Counter[int | None] = Counter()

    def __len__(self) -> int:
        return len(self.indices)

    @property
    def indices(self) -> set[int]:
        """Indices of all open groups."""
        return self.in_flight | self.decided

    def restore(self, turns_from: Mapping[int, int]) -> None:
        """Replace the groups in flight by the open groups of a ledger (`IssueLedger`), less those that are decided.

        turns_from: by index of each open group of the ledger, a sequence number of TURNS before which the group has no turn.
        """
        self.in_flight = turns_from.keys() - self.decided
        self._turns_from = dict(turns_from)

    def issue(self, indices: Collection[int], first: int) -> None:
        """Add groups that are about to be issued. first: a sequence number of TURNS before which they have no turn."""
        self.in_flight.update(indices)
        self._turns_from |= dict.fromkeys(indices, first)

    def is_played(self, index: int) -> bool:
        """Return whether a group is in flight and not complete."""
        return index in self.in_flight and index not in self.complete

    def count(self, index: int | None, episode: Episode) -> None:
        """Add to the memory in use that of a kept episode. index: of its group; None: it is of the evaluation. Raises EpisodesTooLarge."""
        self._bytes[index] += kept_bytes(episode)
        if (size := self._bytes.total()) > MAX_KEPT_BYTES:
            raise EpisodesTooLarge(
                f"the conversations, candidates and metrics of the episodes in open groups and the evaluation take {size >> 20} MiB, more than "
                f"the {MAX_KEPT_BYTES >> 20} MiB that the orchestrator keeps for a job: lower their number in each episode, evaluation.tasks, "
                "rollout.groupSize or training.groupsPerStep"
            )

    def resolvable(self, *, in_order: bool) -> list[CompleteGroup]:
        """Return the complete groups. in_order: return them by index, and only those before the first group in flight that is not complete."""
        if not in_order:
            return list(self.complete.values())
        ready: list[CompleteGroup] = []
        for index in sorted(self.in_flight):
            if index not in self.complete:
                break
            ready.append(self.complete[index])
        return ready

    def decide(self, index: int) -> None:
        """Move a group from the groups in flight to the decided ones."""
        self.complete.pop(index, None)
        self.in_flight.discard(index)
        self.decided.add(index)

    def recorded(self, indices: Collection[int]) -> None:
        """Remove groups whose step is on record."""
        self.decided.difference_update(indices)
        self.in_flight.difference_update(indices)
        for index in indices:
            del self._bytes[index]
            self._turns_from.pop(index, None)

    def turns_from(self, indices: Iterable[int]) -> tuple[int, ...]:
        """Return for each group, in the order of `indices`, a sequence number of TURNS before which it has no turn; 1 if none is known."""
        return tuple(self._turns_from.get(index, 1) for index in indices)

    def evaluated(self) -> None:
        """Stop counting the memory of the evaluation's episodes, once the evaluation is on record."""
        del self._bytes[None]
