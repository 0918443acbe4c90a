"""What is to be played: tasks, which of them are out, and the version that a group is sampled from."""

from pydantic import Field

from marlaas_api.messages.base import BusMessage, JobMessage
from marlaas_api.names import Split


class TaskMessage(JobMessage):
    """One prompt instance to play `group_size` times; TASKS. Its content is the environment's, from index and seed.

    A training task that comes again in a later pass through the data has the same index and seed, and a group of its own.
    """

    group: str
    split: Split
    index: int = Field(ge=0)
    seed: int
    group_size: int = Field(ge=1)


class IssueLedger(JobMessage):
    """KV `ledger`: which tasks the orchestrator has given out; written before they are published, by compare-and-set.

    open: indices of groups issued and not yet part of a recorded step. next_index: never issued so far. evaluating: version under
    evaluation. skipped_*: indices below next_index that were never issued because their tasks rested (in_pass: in the running pass alone).

    open_from, evaluating_from: of each open group, in the order of `open`, and of the evaluation, a sequence of TURNS below which it has no
    turn; read before the group was given out. Missing ones are 1: nothing is known. episode_bytes: what an episode adds to TURNS; 0: not measured.
    """

    next_index: int = 0
    skipped_in_pass: int = 0
    skipped_solved: int = 0
    skipped_hopeless: int = 0
    open: tuple[int, ...] = ()
    evaluating: int | None = None
    open_from: tuple[int, ...] = ()
    evaluating_from: int = 1
    episode_bytes: int = 0


class Pin(BusMessage):
    """KV `pins`: the one version that a group is sampled from; created once, never changed."""

    version: int
