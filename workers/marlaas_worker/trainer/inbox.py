"""Messages received for an agent's uncommitted steps, purely: each position once, in order."""

from dataclasses import dataclass, field

from marlaas_api.errors import Permanent
from marlaas_api.messages import GroupReady, StepClosed


class LogInvalid(Permanent):
    """The GROUPS log contradicts itself or the committed version."""


@dataclass(slots=True)
class _Step:
    groups: dict[int, GroupReady] = field(default_factory=dict)
    closed: StepClosed | None = None
    num_taken: int = 0


class StepInbox:
    """Messages of the steps after the committed step. Adding the same message again has no effect."""

    def __init__(self, committed_step: int, version: int) -> None:
        self.committed_step = committed_step
        self.version = version
        self._steps: dict[int, _Step] = {}

    def is_committed(self, message: GroupReady | StepClosed) -> bool:
        """Return whether the message's step is already committed."""
        return message.step <= self.committed_step

    def add(self, message: GroupReady | StepClosed) -> None:
        """Add a message. Raises LogInvalid if it contradicts an earlier one."""
        if self.is_committed(message):
            return
        step = self._steps.setdefault(message.step, _Step())
        if isinstance(message, StepClosed):
            known: GroupReady | StepClosed | None = step.closed
            step.closed = step.closed or message
        else:
            known = step.groups.setdefault(message.position, message)
        if known is not None and known != message:
            raise LogInvalid(f"step {message.step} of {message.agent} is assigned twice: {known!r} and {message!r}")

    def next_group(self) -> GroupReady | None:
        """Return the group at the current step's next position, or None if it has not arrived.

        Raises LogInvalid for a wrong version.
        """
        step = self._current()
        group = None if step is None else step.groups.get(step.num_taken)
        if group is not None:
            self._check_base(group)
            if group.staleness < 0:
                raise LogInvalid(
                    f"group {group.group} was sampled at version {group.version}, after {group.base_version}"
                )
        return group

    def take(self, group: GroupReady) -> None:
        """Mark the group as accumulated, and go on to the next position."""
        self._steps[group.step].num_taken = group.position + 1

    def rewind(self) -> None:
        """Return to the first group of the current step."""
        step = self._current()
        if step is not None:
            step.num_taken = 0

    def due(self) -> StepClosed | None:
        """Return the current step's closing message once all of its groups are taken, else None. Raises LogInvalid."""
        step = self._current()
        if step is None or step.closed is None or step.num_taken < step.closed.num_groups:
            return None
        self._check_base(step.closed)
        if len(step.groups) > step.closed.num_groups:
            raise LogInvalid(
                f"step {step.closed.step} has {len(step.groups)} groups, closed with {step.closed.num_groups}"
            )
        return step.closed

    def commit(self, step: int) -> None:
        """Record that the step is committed, and drop its messages."""
        self.committed_step = step
        self.version += 1
        self._steps = {number: value for number, value in self._steps.items() if number > step}

    def consumed(self) -> tuple[str, ...]:
        """Return the names of the current step's groups taken so far, by position."""
        step = self._current()
        return () if step is None else tuple(step.groups[position].group for position in range(step.num_taken))

    def _current(self) -> _Step | None:
        return self._steps[min(self._steps)] if self._steps else None

    def _check_base(self, message: GroupReady | StepClosed) -> None:
        if message.base_version != self.version:
            raise LogInvalid(
                f"step {message.step} is to be trained at version {message.base_version}, and {message.agent} is at {self.version}"
            )
