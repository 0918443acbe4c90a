"""Counts the engine time and the tokens that tenants, jobs and agents use. Pure; the caller passes the clock, in seconds."""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from marlaas_api.messages import JobAgent
from marlaas_worker.rollout.served_jobs import ServedJob

HALF_LIFE_S = 60.0
"""Age in seconds at which an agent's tokens count half."""
_FIRST_TOKEN_S, _NEW_WEIGHT = 0.02, 0.1


@dataclass(slots=True)
class RecentSums:
    """Sums of amounts by key, in which an amount counts less with its age.

    Args:
        half_life_s: age in seconds at which an amount counts half.
        least: sums below it are dropped.
    """

    half_life_s: float
    least: float
    _sums: dict[str, float] = field(default_factory=dict)
    _at: float = 0.0

    def add(self, amounts: Mapping[str, float], now: float) -> None:
        """Add amounts, by key, to the sums. now: not before that of earlier calls."""
        self._sums = self.at(now)
        self._at = now
        for key, amount in amounts.items():
            self._sums[key] = self._sums.get(key, 0.0) + amount

    def keep(self, wanted: Callable[[str], bool]) -> None:
        """Drop all keys for which `wanted` returns False."""
        self._sums = {key: total for key, total in self._sums.items() if wanted(key)}

    def at(self, now: float) -> dict[str, float]:
        """Return the sums by key at the time `now`."""
        factor = 0.5 ** ((now - self._at) / self.half_life_s)
        return {key: total * factor for key, total in self._sums.items() if total * factor >= self.least}


def recent_tokens() -> RecentSums:
    """Return empty sums of agents' recent tokens, by policy key. A sum below one token is dropped."""
    return RecentSums(HALF_LIFE_S, 1.0)


@dataclass(frozen=True, slots=True)
class Computed:
    """Tokens that the engine computed for a request. num_prompt: of its prompt, without those from the prefix cache."""

    num_prompt: int = 0
    num_generated: int = 0

    @property
    def cost(self) -> int:
        """Tokens that the request is charged: both numbers together."""
        return self.num_prompt + self.num_generated


@dataclass(slots=True)
class DecodeTime:
    """Moving average of a request's seconds per generated token. The tokens of unfinished generations are estimated with it."""

    _token_s: float = _FIRST_TOKEN_S

    def note(self, seconds: float, num_tokens: int) -> None:
        """Record a complete generation. seconds: since its first token."""
        if num_tokens:
            self._token_s += _NEW_WEIGHT * (seconds / num_tokens - self._token_s)

    def tokens_in(self, seconds: float, max_tokens: int) -> int:
        """Estimate the number of tokens generated for a request in these seconds: at least one, at most `max_tokens`."""
        return min(max_tokens, 1 + int(seconds / max(self._token_s, 1e-6)))


@dataclass(slots=True)
class EngineMeter:
    """Counts engine time and tokens since the role's start. The totals of single jobs are in `ServedJob.used`.

    While n requests are in the engine, each of them is charged 1/n of the time.

    Attributes:
        busy_s: seconds with requests in the engine.
        num_running: requests in the engine now.
        tenant_tokens: prompt and output tokens that the engine computed, by tenant.
        agents: sums of the same tokens by the agent's policy key, only of jobs with several policies; a token counts half after HALF_LIFE_S.
        decode: recent average of seconds per generated token.
    """

    busy_s: float = 0.0
    num_running: int = 0
    tenant_tokens: Counter[str] = field(default_factory=Counter)
    agents: RecentSums = field(default_factory=recent_tokens)
    decode: DecodeTime = field(default_factory=DecodeTime)
    _share_s: float = 0.0
    _at: float = 0.0  # Only used while a request runs; the first `enter` sets it.

    def enter(self, now: float) -> float:
        """Count a request that enters the engine; return the mark to pass to `leave`."""
        self.advance(now)
        self.num_running += 1
        return self._share_s

    def leave(self, mark: float, now: float) -> float:
        """Count a request that leaves the engine; return its share of the engine's time, in seconds. mark: from its `enter`."""
        self.advance(now)
        self.num_running -= 1
        return self._share_s - mark

    def charge(self, job: ServedJob, computed: Computed, share_s: float, served: JobAgent, now: float) -> None:
        """Add the use of a request to the totals of its job and tenant, and of the agent whose policy it used.

        Args:
            job: the job of the request.
            computed: tokens that the engine computed for the request.
            share_s: the request's share of the engine's time in seconds, from `leave`.
            served: the agent whose policy generated.
        """
        job.used.add(computed.num_generated, share_s)
        self.tenant_tokens[served.document.tenant] += computed.cost
        if len(served.document.spec.policies) > 1:
            self.agents.add({served.policy_key: computed.cost}, now)

    def unfinished(self, num_prompt: int, running_s: float | None, max_tokens: int) -> Computed:
        """Estimate the tokens that the engine computed for a request that was cancelled or failed: the engine does not report them.

        Args:
            num_prompt: prompt tokens outside the prefix cache, as estimated at the entry.
            running_s: seconds since the first token; None if there was none. The prompt counts in that case too, because the engine
                may have computed nearly all of it.
            max_tokens: most tokens that the request could generate.
        """
        return Computed(num_prompt, 0 if running_s is None else self.decode.tokens_in(running_s, max_tokens))

    def advance(self, now: float) -> None:
        """Add the time since the last call to `busy_s`, and divide it equally among the running requests."""
        if self.num_running:
            self.busy_s += now - self._at
            self._share_s += (now - self._at) / self.num_running
        self._at = now
