"""The tokens at which a reply ends: the union of those that a model's files, its tokenizer and its chat template name.

Fine-tunes often name their end token in one of these places only. A reply that runs past its end goes on to `maxTokens`, and
what follows would be trained. Standard library only.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import combinations
from pathlib import Path
from typing import Any

from marlaas.models.chat_template import ReplyFrame, closing_token, special_tokens
from marlaas.models.weight_files import read_json

GENERATION, CONFIG, TEXT = "generation_config.json", "config.json", "config.json (text_config)"
TOKENIZER, TEMPLATE = "the tokenizer", "the chat template"


@dataclass(frozen=True, slots=True)
class EndTokens:
    """End tokens by the place that names them; a place that names none is left out.

    Attributes:
        texts: how tokens are written, for messages.
        problems: sentences about values that are no token ids, which are ignored.
        vocab_size: number of the model's ids; None if unknown.
    """

    by_place: Mapping[str, frozenset[int]] = field(default_factory=dict)
    texts: Mapping[int, str] = field(default_factory=dict)
    problems: tuple[str, ...] = ()
    vocab_size: int | None = None

    @property
    def ids(self) -> frozenset[int]:
        """All end tokens."""
        return frozenset[int]().union(*self.by_place.values())

    @property
    def notes(self) -> tuple[str, ...]:
        """Sentences for the owner of the model: bad values, and places that disagree."""
        return (*self.problems, *self._disagreement())

    def found(self, place: str, given: object) -> "EndTokens":
        """Return the same with what a place names as `eos_token_id`: an id, a list of ids, or None."""
        values = given if isinstance(given, list) else [] if given is None else [given]
        most = self.vocab_size or 1 << 31
        good = {one for one in values if type(one) is int and 0 <= one < most}
        bad = [self._problem(place, one) for one in values if type(one) is not int or one not in good]
        by_place = {**self.by_place, place: frozenset(good)} if good else self.by_place
        return replace(self, by_place=by_place, problems=(*self.problems, *bad))

    def _problem(self, place: str, value: object) -> str:
        why = f"outside the vocabulary of {self.vocab_size} tokens" if type(value) is int else "not a token id"
        return f"{place}: eos_token_id has {value!r:.80}, which is {why}, so no reply ends there; expected a number, or a list of numbers"

    def _disagreement(self) -> Iterator[str]:
        """Yield a sentence if two places have neither set within the other, or programs that read only generation_config.json miss an id."""
        if not self.by_place:
            yield "nothing names an end token, so every reply goes on to maxTokens; set eos_token_id in generation_config.json"
        nested = all(one <= other or other <= one for one, other in combinations(self.by_place.values(), 2))
        ends = self.by_place.get(GENERATION)
        configured = self.by_place.get(CONFIG, frozenset()) | self.by_place.get(TEXT, frozenset())
        if not nested or (ends is not None and not configured <= ends):
            named = "; ".join(f"{place} names {self._listed(ids)}" for place, ids in self.by_place.items())
            yield f"the model's places for end tokens disagree: {named}; a reply ends at each of them"

    def _listed(self, ids: frozenset[int]) -> str:
        return ", ".join(f"{one} ({self.texts[one]})" if one in self.texts else str(one) for one in sorted(ids))


def configured_ends(folder: Path) -> EndTokens:
    """Return the end tokens that the model's configuration names. Raises NotAModel."""
    config = read_json(folder / CONFIG) if (folder / CONFIG).is_file() else {}
    generation = read_json(folder / GENERATION) if (folder / GENERATION).is_file() else {}
    nested = config.get("text_config")
    text: dict[str, Any] = nested if isinstance(nested, dict) else {}
    size = text.get("vocab_size", config.get("vocab_size"))
    ends = EndTokens(vocab_size=size if isinstance(size, int) and size > 0 else None)
    given = ((GENERATION, generation), (CONFIG, config), (TEXT, text))
    for place, fields in given:
        ends = ends.found(place, fields.get("eos_token_id"))
    return ends


def added_tokens(folder: Path) -> dict[str, int]:
    """Return the added tokens of a folder's tokenizer and their ids. Raises NotAModel."""
    return {text: number for text, number, _ in _added(folder)}


def special_added_tokens(folder: Path) -> frozenset[str]:
    """Return the special tokens of a folder's tokenizer: those that are added as such, and those that its configuration names. Raises NotAModel."""
    return frozenset((*special_tokens(folder).values(), *(text for text, _, special in _added(folder) if special)))


def _added(folder: Path) -> Iterator[tuple[str, int, bool]]:
    """Yield each added token with its id, and whether it is special."""
    if (file := folder / "tokenizer_config.json").is_file():
        decoder = read_json(file).get("added_tokens_decoder")
        for number, one in decoder.items() if isinstance(decoder, dict) else ():
            if isinstance(one, dict) and str(number).isdigit():
                yield str(one.get("content")), int(number), one.get("special") is True
    if (file := folder / "tokenizer.json").is_file():
        added = read_json(file).get("added_tokens")
        for one in added if isinstance(added, list) else ():
            if isinstance(one, dict) and isinstance(one.get("id"), int):
                yield str(one.get("content")), one["id"], one.get("special") is True


def read_ends(folder: Path, frame: ReplyFrame | None) -> EndTokens:
    """Return the end tokens of a model's files, without loading its tokenizer. frame: of its chat template. Raises NotAModel."""
    tokens = added_tokens(folder)
    ends = replace(configured_ends(folder), texts={number: text for text, number in tokens.items()})
    ends = ends.found(TOKENIZER, tokens.get(special_tokens(folder).get("eos_token", "")))
    return ends if frame is None else ends.found(TEMPLATE, closing_token(frame, tokens))
