"""Messages about tasks: the tasks themselves, the ledger of issued tasks, and the version that a group is sampled from."""

from pydantic import Field

from marlaas_api.messages.base import BusMessage, JobMessage
from marlaas_api.names import Split


class TaskMessage(JobMessage):
    """One prompt instance to roll out `group_size` times; stream TASKS. The environment makes its content from index and seed.

    A training task that is repeated in a later pass through the data has the same index and seed, and a new group.
    After each preemption of its job, a task is issued again. task: the index that the environment gets, if it is not `index`: an
    evaluation numbers the tasks of all its suites, and each suite has the first held-out tasks. num_preemptions: of the job before it was issued. ended: members
    that are not played, because they have an Episode already.
    """

    group: str
    split: Split
    index: int = Field(ge=0)
    task: int | None = Field(None, ge=0)
    seed: int
    group_size: int = Field(ge=1)
    num_preemptions: int = 0
    ended: tuple[int, ...] = ()


class IssueLedger(JobMessage):
    """The tasks that the orchestrator has issued; KV `ledger`. Written by compare-and-set before the tasks are published.

    open: indices of groups that were issued and do not yet belong to a recorded step. next_index: lowest index never
    issued. evaluating: version under evaluation (`StepRecord.version`); evaluating_step: number of finished steps after
    which its versions were the newest; evaluating_versions: the versions of the agents in it. skipped_*: number of indices below next_index
    that were never issued because their tasks were skipped (in_pass: in the current pass only). past_versions: by agent that plays
    past versions, the one that it plays in groups issued while step `past_step` is open.

    open_from, evaluating_from: for each open group, in the order of `open`, and for the evaluation, a sequence of TURNS
    below which it has no turn; read before the group was issued. Missing values are 1: nothing is known. episode_bytes:
    bytes that an episode adds to TURNS; 0: not measured.
    """

    next_index: int = 0
    skipped_in_pass: int = 0
    skipped_solved: int = 0
    skipped_hopeless: int = 0
    open: tuple[int, ...] = ()
    past_step: int = -1
    past_versions: dict[str, int] = Field(default_factory=dict)
    evaluating: int | None = None
    evaluating_step: int = 0
    evaluating_versions: dict[str, int] = Field(default_factory=dict)
    open_from: tuple[int, ...] = ()
    evaluating_from: int = 1
    episode_bytes: int = 0


class Pin(BusMessage):
    """The one version that a group is sampled from; KV `pins`. Created once, never changed."""

    version: int
