"""Ends of replies that a job or a request adds: stop strings, searched in the text of the sampled tokens, and stop tokens.

A reply ends with the token that completes a stop string. That token and all before it are recorded and trained. Whether a token is
sampled depends only on the tokens before it, so the recorded tokens have the policy's distribution.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from marlaas_api.messages import GenerateRequest
from marlaas_api.messages.job_spec import SamplingSettings

_MARGIN = 8
"""Tokens that are decoded before the longest possible match, because some tokenizers drop a space at the beginning of a text."""


class WritingTokenizer(Protocol):
    """Tokenizer interface of this module, which needs texts with special tokens. Implemented by `tokenizer.PretrainedTokenizer`."""

    def raw(self, ids: Sequence[int]) -> str:
        """Return the text of ids, special tokens included."""
        ...

    def special_id(self, text: str) -> int | None:
        """Return the id of the special token with this text; None if there is none."""
        ...


@dataclass(frozen=True, slots=True)
class Stops:
    """Stop strings of a request: the reply ends with the token that completes one of them.

    texts: the stop strings; at least one. raw: returns the text of ids, special tokens included.
    """

    texts: tuple[str, ...]
    raw: Callable[[Sequence[int]], str]
    _window: int = field(init=False)

    def __post_init__(self) -> None:
        longest = max(len(text.encode(errors="surrogatepass")) for text in self.texts)
        object.__setattr__(self, "_window", longest + _MARGIN)  # every token has at least one byte

    def end(self, ids: Sequence[int], checked: int = 0) -> int | None:
        """Return how many of a reply's ids form its shortest beginning with a stop string; None if the reply contains no stop string.

        checked: number of ids at the beginning that are known to contain no stop string.
        """
        for length in range(checked + 1, len(ids) + 1):
            text = self.raw(ids[max(0, length - self._window) : length])
            if any(one in text for one in self.texts):
                return length
        return None


def stops_of(
    tokenizer: WritingTokenizer, rollout: SamplingSettings, request: GenerateRequest
) -> tuple[Stops | None, frozenset[int]]:
    """Return the stop strings of a request's reply, None if it has none, and the ids of its stop tokens, without the model's end tokens.

    If a stop string is the text of a special token, the id of that token is among the stop tokens, too. rollout: the job's settings.
    """
    texts = tuple(dict.fromkeys((*rollout.stop, *request.stop)))
    special = [number for text in texts if (number := tokenizer.special_id(text)) is not None]
    return Stops(texts, tokenizer.raw) if texts else None, frozenset((*rollout.stop_token_ids, *special))
