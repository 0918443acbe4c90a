"""Limits on the requests in an engine: their number, their tokens in its KV cache, and their prompt tokens in a step. Pure.

When vLLM's KV cache is full, vLLM preempts a request and later computes its tokens again. So requests wait outside the engine
until their tokens fit. A request reserves its prompt and the output that is expected of its job. It does not reserve
`maxTokens`: most outputs are much shorter, and most of the cache would stay unused. An output that is longer than
expected is not counted while it is generated, because the engine reports tokens only at the end; outputs that are
shorter than expected make up for it.
"""

import math
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field

BLOCK_TOKENS = 32
"""Tokens per block of the KV cache. A block belongs to one request, so reservations are rounded up to blocks."""
RECENT = 64
"""Number of a job's last outputs from which the length of its next ones is estimated."""
_STEPS = 2


@dataclass(slots=True, eq=False)
class Place:
    """A request's place in the engine.

    Attributes:
        cost: real cost of the request in tokens, set by the place's holder; 0 until then.
        begin: the place's holder calls it at the request's first token, when its prompt has been computed.
    """

    cost: float = 0.0
    begin: Callable[[], None] = lambda: None


class KvBudget:
    """Reservations of the requests in the engine: at most `max_seqs` requests, and at most `kv_tokens` tokens of its KV cache.

    Args:
        max_seqs: most requests in the engine.
        kv_tokens: as in `set_kv_tokens`.

    Attributes:
        num_reserved: tokens that are reserved now.
    """

    def __init__(self, max_seqs: int, kv_tokens: int = 0) -> None:
        self._max_seqs = max_seqs
        self._num_inside = 0
        self.num_reserved = 0.0
        self.set_kv_tokens(kv_tokens)

    @property
    def kv_tokens(self) -> float:
        """Tokens that fit into the KV cache; infinite if the engine does not say."""
        return self._kv_tokens

    @property
    def room(self) -> float:
        """Tokens that can be reserved now; negative if no request may enter; infinite if the engine is empty or `kv_tokens` is.

        An engine without requests takes any: a request that was queued for an earlier incarnation may be larger than its KV cache.
        """
        if self._num_inside == 0:
            return math.inf
        return self._kv_tokens - self.num_reserved if self._num_inside < self._max_seqs else -1.0

    def set_kv_tokens(self, kv_tokens: int) -> None:
        """Set the size of the KV cache in tokens, after an engine start. 0: unknown."""
        self._kv_tokens = float(kv_tokens) if kv_tokens > 0 else math.inf

    def size(self, num_tokens: int) -> float:
        """Return the tokens to reserve for a request of `num_tokens`: whole blocks, at most the KV cache, so that every request fits alone."""
        return min(float(math.ceil(num_tokens / BLOCK_TOKENS) * BLOCK_TOKENS), self._kv_tokens)

    def take(self, size: float) -> None:
        """Reserve the room of a request that enters the engine. size: as from `size`."""
        self._num_inside += 1
        self.num_reserved += size

    def give_back(self, size: float) -> None:
        """Free the room of a request that has left the engine."""
        self._num_inside -= 1
        self.num_reserved -= size


@dataclass(slots=True)
class _Present:
    """A tenant with requests that wait for a place or are in the engine.

    weight: the tenant's. num_requests: these requests. num_prompt: tokens of their prompts in the engine that are not computed yet.
    """

    weight: float
    num_requests: int = 0
    num_prompt: int = 0


class PrefillShares:
    """Limits the prompt tokens that the engine has yet to compute for a tenant.

    The limit is the tenant's share, by weight, of the tokens of two steps: the one that runs, and the next one, which begins before the
    role learns of the first tokens of the running one. An engine computes prompts in the same steps as the next tokens of all other
    requests. If one tenant's prompts filled every step, each token of the others would take as long as a full step.

    A prompt that is larger than the share enters while the tenant has no other prompt to compute. A tenant that is the only one with
    requests is not limited.

    step_tokens: most tokens that the engine computes in one step; 0 if unknown: then no tenant is limited.
    """

    def __init__(self) -> None:
        self.step_tokens = 0
        self._present: dict[str, _Present] = {}

    def join(self, tenant: str, weight: float) -> None:
        """Count a tenant's request that begins to wait for a place in the engine. weight: the tenant's, from now on."""
        one = self._present.setdefault(tenant, _Present(weight))
        one.weight = weight
        one.num_requests += 1

    def leave(self, tenant: str) -> None:
        """Remove a request that has left the engine, or waits no longer."""
        one = self._present[tenant]
        one.num_requests -= 1
        if not one.num_requests:
            del self._present[tenant]

    def allows(self, tenant: str, num_prompt: int) -> bool:
        """Return whether a tenant's prompt may enter the engine now. num_prompt: its tokens that the engine has to compute."""
        one = self._present[tenant]
        if not (self.step_tokens and one.num_prompt and len(self._present) > 1):
            return True
        share = one.weight / sum(other.weight for other in self._present.values())
        return one.num_prompt + num_prompt <= share * _STEPS * self.step_tokens

    def add(self, tenant: str, num_prompt: int) -> None:
        """Change the number of a tenant's prompt tokens that the engine has yet to compute.

        num_prompt: tokens of a prompt that enters the engine; the negative number once the prompt has been computed, or will not be.
        """
        self._present[tenant].num_prompt += num_prompt


@dataclass(slots=True)
class RecentOutputs:
    """Numbers of generated tokens of a job's last `RECENT` requests. Takes half a KiB of memory."""

    _recent: "array[int]" = field(default_factory=lambda: array("q"))

    def expected_tokens(self, max_tokens: int) -> int:
        """Return the 90th percentile of the recent outputs in tokens, at most `max_tokens`; `max_tokens` if there are no recent outputs."""
        recent = sorted(self._recent) or [max_tokens]
        return min(recent[9 * len(recent) // 10], max_tokens)

    def note(self, num_tokens: int) -> None:
        """Record a request's number of generated tokens."""
        self._recent.append(num_tokens)
        del self._recent[:-RECENT]
