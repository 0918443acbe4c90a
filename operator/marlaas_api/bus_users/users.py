"""Users of the bus as values, and the validity of their tokens.

A user's seed is derived from its identity; two users never share one. Times are unix seconds.
"""

from dataclasses import dataclass

HOUR_S = 3600.0
DAY_S = 24 * HOUR_S


@dataclass(frozen=True, slots=True)
class Term:
    """Validity of tokens: all tokens made within one window are equal, and valid for `validity_s` from the window's start."""

    validity_s: float
    window_s: float

    def start(self, now: float) -> int:
        """Return the start of the window that contains `now`."""
        return int(now // self.window_s * self.window_s)

    def end(self, now: float) -> int:
        """Return the time when a token made now expires."""
        return self.start(now) + int(self.validity_s)


PLATFORM_TERM = Term(7 * DAY_S, DAY_S)
"""The platform's roles keep valid tokens for at least six days without the operator."""
SANDBOX_TERM = Term(DAY_S, 6 * HOUR_S)
"""A sandbox runs a tenant's code: a leaked token is valid for at most a day. A job survives 18 hours without the operator."""


@dataclass(frozen=True, slots=True)
class OperatorUser:
    """The operator: writes job documents; reads progress and replicas."""

    @property
    def identity(self) -> str:
        """Name of the user."""
        return "operator"


@dataclass(frozen=True, slots=True)
class OrchestratorUser:
    """The orchestrator, which owns jobs."""

    @property
    def identity(self) -> str:
        """Name of the user."""
        return "orchestrator"


@dataclass(frozen=True, slots=True)
class RolloutUser:
    """The rollout workers (engines) of one pool."""

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
    """`marlaas run`: publishes job documents and reads the results."""

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


@dataclass(frozen=True, slots=True)
class ExporterUser:
    """The exporter of one job, which reports its steps to the tenant's trackers."""

    namespace: str
    job: str
    uid: str

    @property
    def identity(self) -> str:
        """Name of the user."""
        return f"exporter.{self.namespace}.{self.job}.{self.uid}"


TenantUser = SandboxUser | ExporterUser
"""Users whose credential lies in a tenant's namespace."""
PlatformUser = OperatorUser | OrchestratorUser | RolloutUser | TrainerUser | RunnerUser
BusUser = PlatformUser | TenantUser


def term(user: BusUser) -> Term:
    """Return the validity of a user's tokens."""
    return SANDBOX_TERM if isinstance(user, TenantUser) else PLATFORM_TERM


def inbox_prefix(user: BusUser) -> str:
    """Return the prefix of a user's inboxes; no other user has it.

    Names are DNS labels, so that underscores keep the prefixes of two users apart.
    """
    if isinstance(user, SandboxUser):
        return f"_INBOX_{user.namespace}_{user.job}"
    if isinstance(user, ExporterUser):
        return f"_INBOX_{user.namespace}_{user.job}_exporter"
    return f"_INBOX__{user.identity.replace('.', '_')}"
