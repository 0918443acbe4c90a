"""From trajectories to rows and micro-batches, purely. It takes a while for long groups, so callers run it in a thread."""

from collections.abc import Sequence

from marlaas_worker.trainer.batching import pack
from marlaas_worker.trainer.rows import Row, pack_prefix_tree
from marlaas_worker.trainer.trajectories import Trajectory, Weighing, segments_of


def rows_of_groups(
    weighing: Weighing, groups: Sequence[Sequence[Trajectory]], pairs_per_token: int, budget: int
) -> list[Row]:
    """Return the rows of weighed groups, group by group.

    Args:
        pairs_per_token: see `BaseModel`.
        budget: most tokens of a row that holds several segments.
    """
    return [row for one in weighing.segments(groups) for row in pack_prefix_tree(one, pairs_per_token, budget)]


def batches_of_group(group: Sequence[Trajectory], pairs_per_token: int, budget: int) -> list[list[Row]]:
    """Return one group's micro-batches, of which no other group's rows are part.

    All advantages are zero: they are for a measurement. Each token has its trajectory's place in the group.
    """
    parts = [segments_of(member.turns, member.leaves, 0.0, number) for number, member in enumerate(group)]
    rows = pack_prefix_tree([part for each in parts for part in each], pairs_per_token, budget)
    full, rest = pack([], rows, budget)
    return [*full, rest] if rest else full
