"""Messages from the orchestrator to a trainer: complete groups, and the end of a step."""

from marlaas_api.messages.base import BusMessage, JobMessage
from marlaas_api.messages.episodes import Ending


class TrajectoryRef(BusMessage):
    """One member of a group for one agent: its turns (leaves), its reward, and the ending of its episode."""

    member: int
    episode: str
    leaves: tuple[int, ...]
    reward: float
    ending: Ending = Ending.COMPLETED


class GroupReady(JobMessage):
    """A complete group, assigned to a step; stream GROUPS.

    The step trains the group at `base_version`, so that its staleness is already exact. position: consecutive, from 0
    within the step; a trainer accumulates in exactly this order. trajectories: at least two.
    """

    agent: str
    step: int
    base_version: int
    position: int
    group: str
    index: int
    version: int
    trajectories: tuple[TrajectoryRef, ...]

    @property
    def staleness(self) -> int:
        """Version at which the step trains minus the version that the group was sampled from."""
        return self.base_version - self.version


class StepClosed(JobMessage):
    """The end of a step; stream GROUPS. The optimizer step is due after positions 0..num_groups-1 have arrived.

    indices: every task resolved in the step, including those without signal. The orchestrator reads it after a restart;
    the trainer does not use it.
    """

    agent: str
    step: int
    base_version: int
    num_groups: int
    indices: tuple[int, ...] = ()
