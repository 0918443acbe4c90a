"""Who connects to the bus: users as values, and for how long each one's token is good.

An identity is what a user's seed is derived from; two users never share one. Times are unix seconds.
"""

from dataclasses import dataclass

HOUR_S = 3600.0
DAY_S = 24 * HOUR_S


@dataclass(frozen=True, slots=True)
class Term:
    """A token made at any time of a window is the same, and good for `validity_s` from the window's start."""

    validity_s: float
    window_s: float

    def start(self, now: float) -> int:
        """The start of the window that `now` lies in."""
        return int(now // self.window_s * self.window_s)

    def end(self, now: float) -> int:
        """When a token made now expires."""
        return self.start(now) + int(self.validity_s)


PLATFORM_TERM = Term(7 * DAY_S, DAY_S)
"""The platform's own roles live through six days without their operator."""
SANDBOX_TERM = Term(DAY_S, 6 * HOUR_S)
"""A sandbox runs a tenant's code: a token that leaked is worthless after a day; a job lives through 18 hours without the operator."""


@dataclass(frozen=True, slots=True)
class OperatorUser:
    """Writes job documents; reads progress and replicas."""

    @property
    def identity(self) -> str:
        """Name of the user."""
        return "operator"


@dataclass(frozen=True, slots=True)
class OrchestratorUser:
    """Owns jobs."""

    @property
    def identity(self) -> str:
        """Name of the user."""
        return "orchestrator"


@dataclass(frozen=True, slots=True)
class RolloutUser:
    """The engines of one pool."""

    pool: str

    @property
    def identity(self) -> str:
        """Name of the user."""
        return f"rollout.{self.pool}"


@dataclass(frozen=True, slots=True)
class TrainerUser:
    """The trainers of one pool."""

    pool: str

    @property
    def identity(self) -> str:
        """Name of the user."""
        return f"trainer.{self.pool}"


@dataclass(frozen=True, slots=True)
class RunnerUser:
    """`marlaas run`: announces jobs, and reads what comes of them."""

    @property
    def identity(self) -> str:
        """Name of the user."""
        return "runner"


@dataclass(frozen=True, slots=True)
class SandboxUser:
    """The supervisors of one job's sandboxes."""

    namespace: str
    job: str
    uid: str

    @property
    def identity(self) -> str:
        """Name of the user."""
        return f"sandbox.{self.namespace}.{self.job}.{self.uid}"


PlatformUser = OperatorUser | OrchestratorUser | RolloutUser | TrainerUser | RunnerUser
BusUser = PlatformUser | SandboxUser


def term(user: BusUser) -> Term:
    """How long its tokens are good."""
    return SANDBOX_TERM if isinstance(user, SandboxUser) else PLATFORM_TERM


def inbox_prefix(user: BusUser) -> str:
    """Where its answers come back, and nobody else's. Names are DNS labels, so underscores keep two users' prefixes apart."""
    if isinstance(user, SandboxUser):
        return f"_INBOX_{user.namespace}_{user.job}"
    return f"_INBOX__{user.identity.replace('.', '_')}"
