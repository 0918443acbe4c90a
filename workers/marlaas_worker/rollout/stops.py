"""Ends of replies that a job or a request adds: strings, found on the text of the sampled tokens, and tokens.

A reply ends with the token that completes a string. All tokens up to it are recorded and trained; whether a token is sampled
depends only on those before it, so their distribution is the policy's.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from marlaas_api.messages import GenerateRequest
from marlaas_api.messages.job_spec import SamplingSettings

_MARGIN = 8
"""Tokens before the longest match: some tokenizers drop a space at the beginning of a text."""


class WritingTokenizer(Protocol):
    """A tokenizer that writes every token out."""

    def raw(self, ids: Sequence[int]) -> str:
        """Return the text of ids, special tokens included."""
        ...

    def special_id(self, text: str) -> int | None:
        """Return the id of a special token; None if the text is none."""
        ...


@dataclass(frozen=True, slots=True)
class Stops:
    """Strings of which each ends a reply. raw: returns the text of tokens, special ones included."""

    texts: tuple[str, ...]
    raw: Callable[[Sequence[int]], str]
    _window: int = field(init=False)

    def __post_init__(self) -> None:
        longest = max(len(text.encode(errors="surrogatepass")) for text in self.texts)
        object.__setattr__(self, "_window", longest + _MARGIN)  # every token has at least one byte

    def end(self, ids: Sequence[int], checked: int = 0) -> int | None:
        """Return the length of the shortest beginning of a reply whose text contains a string; None if there is none.

        checked: length of the beginning that is known to contain none.
        """
        for length in range(checked + 1, len(ids) + 1):
            text = self.raw(ids[max(0, length - self._window) : length])
            if any(one in text for one in self.texts):
                return length
        return None


def stops_of(
    tokenizer: WritingTokenizer, rollout: SamplingSettings, request: GenerateRequest
) -> tuple[Stops | None, frozenset[int]]:
    """Return the strings and the tokens that end a request's reply, beside the model's end tokens.

    A string that is a special token of the tokenizer is that token, too.
    """
    texts = tuple(dict.fromkeys((*rollout.stop, *request.stop)))
    special = [number for text in texts if (number := tokenizer.special_id(text)) is not None]
    return Stops(texts, tokenizer.raw) if texts else None, frozenset((*rollout.stop_token_ids, *special))
