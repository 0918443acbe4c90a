"""Usage of jobs and tenants: tokens by what became of them, seconds, and stored bytes."""

from collections.abc import Iterable, Mapping
from enum import StrEnum

from marlaas_api.messages.base import BusMessage


class TokenUse(StrEnum):
    """Use of generated tokens: trained, evaluation, of a frozen agent, cut by a preemption, or a kind of waste. The values are fields of `UsageAmounts`."""

    TRAINED = "trained_tokens"
    EVALUATION = "evaluation_tokens"
    ZERO_VARIANCE = "zero_variance_tokens"
    STALE = "stale_tokens"
    FAILED = "failed_tokens"
    REPEATED = "repeated_tokens"
    FROZEN = "frozen_tokens"
    PREEMPTED = "preempted_tokens"
    OPEN = "open_tokens"
    UNRECORDED = "unrecorded_tokens"


class UsageAmounts(BusMessage):
    """Amounts that add up over agents, jobs and tenants.

    Attributes:
        prompt_tokens: tokens of all prompts, each turn's whole prompt; not of plays that a preemption cut.
        cached_tokens: of these, tokens that the engine took from its prefix cache.
        generated_tokens: sum of the following parts.
        trained_tokens: of groups that were trained.
        evaluation_tokens: of held-out tasks.
        zero_variance_tokens: of groups whose members all had the same reward, or of which fewer than two counted.
        stale_tokens: of groups that were too stale to train, or complete only after the last step had closed.
        failed_tokens: of episodes that ended with a fault.
        repeated_tokens: of a second play of the same member.
        frozen_tokens: of agents that are not trained, in training groups.
        preempted_tokens: of plays that a preemption of the job cut; not charged.
        open_tokens: of groups that no finished step has resolved.
        unrecorded_tokens: in no recorded episode: of plays that were given up or cancelled, and of deleted files.
        engine_s: seconds of the engines, each batch's time shared among its requests.
        preempted_engine_s: of these, seconds of plays that a preemption of the job cut; not charged.
        trainer_s: seconds that trainers computed.
        sandbox_s: seconds that its episodes took in sandboxes, from their start to their end, waiting included.
        slot_s: seconds for which versions of its adapters had slots of an engine while the job was admitted, summed over the slots.
        admitted_s: seconds for which the job was admitted.
        stored_bytes: of all versions of its adapters, and of the training states that are kept, now.
    """

    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    trained_tokens: int = 0
    evaluation_tokens: int = 0
    zero_variance_tokens: int = 0
    stale_tokens: int = 0
    failed_tokens: int = 0
    repeated_tokens: int = 0
    frozen_tokens: int = 0
    preempted_tokens: int = 0
    open_tokens: int = 0
    unrecorded_tokens: int = 0
    engine_s: float = 0.0
    preempted_engine_s: float = 0.0
    trainer_s: float = 0.0
    sandbox_s: float = 0.0
    slot_s: float = 0.0
    admitted_s: float = 0.0
    stored_bytes: int = 0

    @classmethod
    def generated(cls, tokens: Mapping[TokenUse, int]) -> "UsageAmounts":
        """Return amounts of generated tokens by their use, with their sum."""
        return cls(generated_tokens=sum(tokens.values()), **{use.value: number for use, number in tokens.items()})

    @property
    def wasted_tokens(self) -> int:
        """Charged tokens that neither trained nor evaluated an adapter; those of unfinished steps are not counted yet."""
        parts = (self.zero_variance_tokens, self.stale_tokens, self.failed_tokens, self.repeated_tokens)
        return sum(parts) + self.unrecorded_tokens

    @property
    def charged_tokens(self) -> int:
        """Generated tokens without those that preemptions cut."""
        return self.generated_tokens - self.preempted_tokens

    @property
    def charged_engine_s(self) -> float:
        """Seconds of engines without those of plays that preemptions cut."""
        return self.engine_s - self.preempted_engine_s

    def __add__(self, other: "UsageAmounts") -> "UsageAmounts":
        mine, others = self.__dict__, other.__dict__
        return UsageAmounts.model_construct(**{name: number + others[name] for name, number in mine.items()})

    def counted_as(self, use: TokenUse) -> "UsageAmounts":
        """Return the amounts with the open tokens counted by their use."""
        moved = {use.value: getattr(self, use.value) + self.open_tokens}
        return self.model_copy(update={"open_tokens": 0, **moved})

    def preempted(self) -> "UsageAmounts":
        """Return the amounts of a play that a preemption cut: none is charged."""
        tokens, engine_s = self.generated_tokens, self.engine_s
        cut = UsageAmounts.generated({TokenUse.PREEMPTED: tokens})
        return cut.model_copy(update={"engine_s": engine_s, "preempted_engine_s": engine_s})

    def as_dict(self) -> dict[str, int | float]:
        """Return all amounts, with `wasted_tokens`, and the charged tokens and seconds, for CSV and JSON."""
        charged = {"charged_tokens": self.charged_tokens, "charged_engine_s": self.charged_engine_s}
        return self.model_dump() | {"wasted_tokens": self.wasted_tokens, **charged}

    def closed(self) -> "UsageAmounts":
        """Return the amounts of a job that is removed: nothing of it is open or stored any more."""
        return self.counted_as(TokenUse.UNRECORDED).model_copy(update={"stored_bytes": 0})


def total(amounts: Iterable[UsageAmounts]) -> UsageAmounts:
    """Return the sum."""
    return sum(amounts, UsageAmounts())


def merged(one: Mapping[str, UsageAmounts], other: Mapping[str, UsageAmounts]) -> dict[str, UsageAmounts]:
    """Return the sums by name of two mappings."""
    return {**one, **{name: one.get(name, UsageAmounts()) + amounts for name, amounts in other.items()}}


class TenantUsage(BusMessage):
    """Usage of a tenant since its first job; KV `tenants`, key `usage.<tenant>`. The orchestrator writes it.

    total: of all its jobs, deleted ones included. removed: of deleted jobs only. removing: uids of jobs that are part of
    `removed` and may still have a progress; a repeated deletion does not add them again. at: unix seconds of `total`.
    """

    tenant: str
    total: UsageAmounts = UsageAmounts()
    removed: UsageAmounts = UsageAmounts()
    removing: tuple[str, ...] = ()
    at: float = 0.0
