"""What the orchestrator hands to a trainer: complete groups, and the end of a step."""

from marlaas_api.messages.base import BusMessage, JobMessage
from marlaas_api.messages.episodes import Ending


class TrajectoryRef(BusMessage):
    """One member of a group for one agent: where its turns are, what they earned, and how the episode ended."""

    member: int
    episode: str
    leaves: tuple[int, ...]
    reward: float
    ending: Ending = Ending.COMPLETED


class GroupReady(JobMessage):
    """A complete group, assigned to a step; GROUPS. The step trains it at `base_version`, so its staleness is already exact.

    position: dense, from 0 within the step; a trainer accumulates in this order and no other. trajectories: at least two.
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
        """Trainer version minus pinned version at the moment of training."""
        return self.base_version - self.version


class StepClosed(JobMessage):
    """No more groups come for this step; GROUPS. The optimizer step is due once positions 0..num_groups-1 are in.

    indices: every task resolved in the step, those without signal included (the orchestrator's memory, not the trainer's business).
    """

    agent: str
    step: int
    base_version: int
    num_groups: int
    indices: tuple[int, ...] = ()
