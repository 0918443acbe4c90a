"""Messages about tasks: the tasks themselves, and the version that a group is sampled from."""

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


class Pin(BusMessage):
    """The one version that a group is sampled from; KV `pins`. Created once, never changed."""

    version: int
