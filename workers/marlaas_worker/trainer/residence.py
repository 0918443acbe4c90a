"""An agent's place in the trainer's memory: its learner exists while it has one."""

import asyncio

from marlaas_worker.trainer.assignment import Assignment
from marlaas_worker.trainer.intake import StepInbox
from marlaas_worker.trainer.learner import Learner
from marlaas_worker.trainer.room import Pause
from marlaas_worker.trainer.shared import TrainerDependencies


class Residence:
    """Asks for room, makes the learner, and closes it. changed: set when the agent may enter, or has to leave."""

    def __init__(self, dependencies: TrainerDependencies, assignment: Assignment, changed: asyncio.Event) -> None:
        self._dependencies, self._assignment, self._changed = dependencies, assignment, changed
        self._made: list[Learner] = []

    @property
    def is_here(self) -> bool:
        """Whether the agent has a learner."""
        return bool(self._made)

    @property
    def learner(self) -> Learner:
        """The learner of an agent that is here."""
        return self._made[-1]

    def enters(self, is_due: bool) -> bool:
        """Return whether there is room; if not, `changed` is set when there may be. is_due: see `room`."""
        agent = self._assignment.agent
        need = self._dependencies.memory.bytes_per_rank * agent.adapter.rank if agent.trainable else 0
        return self._dependencies.room.enter(self._assignment.policy_key, need, is_due, self._changed.set)

    def must_leave(self, inbox: StepInbox) -> bool:
        """Return whether another agent needs the place. inbox: what is left to train. Raises LogInvalid."""
        return self._dependencies.room.pause(self._assignment.policy_key, pause_of(inbox))

    async def make_learner(self) -> Learner:
        """Make the learner of an agent that has entered."""
        await self._dependencies.compute.run(
            lambda: self._made.append(Learner(self._dependencies.model, self._assignment)), self._assignment.account
        )
        return self._made[-1]

    async def leave(self) -> None:
        """Close the learner, also one whose making was cancelled, and free the room. May be repeated."""
        for learner in self._made:
            await self._dependencies.compute.run(learner.close, self._assignment.account)
        self._made.clear()
        self._dependencies.room.leave(self._assignment.policy_key)


def pause_of(inbox: StepInbox) -> Pause:
    """Return what an agent with this inbox does next. Raises LogInvalid."""
    has_work = inbox.next_group() is not None or inbox.due() is not None
    if inbox.is_within_step:
        return Pause.BUSY if has_work else Pause.WITHIN_STEP
    return Pause.AFTER_STEP if has_work else Pause.BETWEEN_STEPS
