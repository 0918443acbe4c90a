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
    """The tasks that the orchestrator has issued; KV `ledger`. Written by compare-and-set before the tasks are published."""

    next_index: int = 0
    """Lowest index never issued."""
    skipped_in_pass: int = 0
    """Indices below `next_index` that were never issued because their tasks were skipped, in the current pass."""
    skipped_solved: int = 0
    """Those whose tasks were solved, in all passes."""
    skipped_hopeless: int = 0
    """Those whose tasks were hopeless, in all passes."""
    open: tuple[int, ...] = ()
    """Indices of groups that were issued and do not yet belong to a recorded step."""
    past_step: int = -1
    """Step during which `past_versions` are drawn."""
    past_versions: dict[str, int] = Field(default_factory=dict)
    """By agent that plays past versions, the one that it plays in groups issued while step `past_step` is open."""
    evaluating: int | None = None
    """Version under evaluation (`StepRecord.version`)."""
    evaluating_step: int = 0
    """Number of finished steps after which its versions were the newest."""
    evaluating_versions: dict[str, int] = Field(default_factory=dict)
    """Versions of the agents in it."""
    open_from: tuple[int, ...] = ()
    """For each open group, in the order of `open`, a sequence of TURNS below which it has no turn, read before the group was issued.
    Missing values are 1: nothing is known.
    """
    evaluating_from: int = 1
    """The same for the evaluation."""
    episode_bytes: int = 0
    """Bytes that an episode adds to TURNS; 0: not measured."""


class Pin(BusMessage):
    """The one version that a group is sampled from; KV `pins`. Created once, never changed."""

    version: int
