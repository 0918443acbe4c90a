"""Parsing of manifests and API objects into kinds, with error sentences for the author of the manifest.

Parsing is stricter than the models, which also read messages of the bus: text is not accepted as a number, and keys
must be camelCase. Files and line numbers are unknown here; `marlaas.manifest` adds them.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from pydantic import ValidationError
from pydantic.alias_generators import to_camel
from pydantic_core import ErrorDetails

from marlaas_api.errors import InvalidInput
from marlaas_api.kinds.base import Kind, expected_text
from marlaas_api.kinds.fields import did_you_mean, field_at, field_names, find_field, listed, model_at
from marlaas_api.kinds.sizes import object_problem

Loc = tuple[str | int, ...]
K = TypeVar("K", bound=Kind)

_NAME = re.compile(r"[A-Za-z0-9_.-]+(\[\])?")
_FREE_FORM: Loc = ("spec", "environment", "args")
_FREE_FORM_OF_AGENT: tuple[Loc, Loc] = (("spec", "agents"), ("initFrom", "sft", "data"))
_METADATA = frozenset(
    {
        "annotations",
        "creationTimestamp",
        "deletionGracePeriodSeconds",
        "deletionTimestamp",
        "finalizers",
        "generateName",
        "generation",
        "labels",
        "managedFields",
        "name",
        "namespace",
        "ownerReferences",
        "resourceVersion",
        "selfLink",
        "uid",
    }
)


@dataclass(frozen=True, slots=True)
class Problem:
    """One problem of one field. loc: keys and list positions from the object's root."""

    loc: Loc
    text: str

    @property
    def path(self) -> str:
        """The field in the notation `spec.agents[1].name`; empty for the whole object."""
        return dotted(self.loc)

    def __str__(self) -> str:
        return f"{self.path}: {self.text}" if self.loc else self.text


class InvalidObject(InvalidInput):
    """An invalid object, with all of its problems."""

    def __init__(self, problems: tuple[Problem, ...]) -> None:
        super().__init__("\n".join(str(problem) for problem in problems))
        self.problems = problems


def parse(kind: type[K], body: Mapping[str, Any]) -> K:
    """Parse an object of a manifest or of the API server into its kind.

    Nulls count as absent, as in Kubernetes. An unknown key is an error also if its value is null (`{groupSize:16}` has
    the key "groupSize:16").

    Raises:
        InvalidObject: with all problems, in the order of the schema.
    """
    strange = (*_strange_metadata(body.get("metadata")), *_too_large(body))
    text = json.dumps(_without_nulls(kind, body))
    try:
        parsed = kind.model_validate_json(text, strict=True, by_alias=True, by_name=False)
    except ValidationError as error:
        raise InvalidObject((*strange, *problems_of(kind, error))) from error
    if strange:
        raise InvalidObject(strange)
    return parsed


def problems_of(kind: type[Kind], error: ValidationError) -> tuple[Problem, ...]:
    """Convert a validation error into problems, in the order of the schema."""
    told = (details for details in error.errors(include_url=False) if not _is_echo(details))
    return tuple(_problem(kind, details) for details in told)


def dotted(loc: Loc) -> str:
    """Format a location: `("spec", "agents", 1)` as `spec.agents[1]`."""
    return "".join(_step(part) for part in loc).removeprefix(".")


def _step(part: str | int) -> str:
    """Format one step of a path; a part that is not a plain name is quoted, so that a path stays on one line."""
    return f".{part}" if isinstance(part, str) and _NAME.fullmatch(part) else f"[{part!r}]"


def found(value: object) -> str:
    """Describe a value of the manifest in terms of YAML."""
    match value:
        case None:
            return "nothing"
        case bool():
            return str(value).lower()
        case str():
            return f"the text {_shortened(value)!r}"
        case list():
            return "a list"
        case dict():
            return "a mapping"
    return str(value)


def _too_large(body: Mapping[str, Any]) -> Iterator[Problem]:
    if problem := object_problem(body):
        yield Problem((), problem)


def _strange_metadata(metadata: object) -> Iterator[Problem]:
    if not isinstance(metadata, Mapping):
        return
    for key in metadata:
        if key not in _METADATA:
            yield Problem(("metadata", str(key)), f"unknown field{did_you_mean(str(key), _METADATA)}")


def _without_nulls(kind: type[Kind], value: Any, loc: Loc = ()) -> Any:
    """Remove nulls, except in free-form arguments and at unknown keys, which are reported later."""
    if loc == _FREE_FORM or (loc[:2], loc[3:]) == _FREE_FORM_OF_AGENT:
        return value
    if isinstance(value, Mapping):
        unknown = {key for key, item in value.items() if item is None and _is_unknown(kind, (*loc, key))}
        return {
            key: _without_nulls(kind, item, (*loc, key))
            for key, item in value.items()
            if item is not None or key in unknown
        }
    if isinstance(value, list | tuple):
        return [_without_nulls(kind, item, (*loc, at)) for at, item in enumerate(value)]
    return value


def _is_unknown(kind: type[Kind], loc: Loc) -> bool:
    """Whether the last part of the location is not a field of its model; outside of models, every key is allowed."""
    model = model_at(kind, loc[:-1])
    return model is not None and loc[-1] not in field_names(model)


def _is_echo(details: ErrorDetails) -> bool:
    """Whether a list counts as too short only because its entries are invalid, which other errors report already."""
    return details["type"] == "too_short" and len(details["input"]) >= details["ctx"]["min_length"]


def _problem(kind: type[Kind], details: ErrorDetails) -> Problem:
    loc = details["loc"]
    if details["type"] == "extra_forbidden":
        return Problem(loc, _unknown(kind, loc))
    if details["type"] == "missing":
        return Problem(loc, _missing(kind, loc))
    if details["type"] == "model_type":
        return Problem(loc, _no_mapping(kind, loc, details["input"]))
    sentence = _SENTENCES.get(details["type"])
    if sentence is None:
        return Problem(loc, str(details.get("ctx", {}).get("error", details["msg"])))
    return Problem(loc, sentence(details["input"], details.get("ctx", {})))


def _no_mapping(kind: type[Kind], loc: Loc, value: object) -> str:
    model = model_at(kind, loc)
    keys = f"; '{dotted(loc)}' takes {listed(field_names(model))}" if model is not None else ""
    return f"expected a mapping of keys to values, found {found(value)}{keys}"


def _unknown(kind: type[Kind], loc: Loc) -> str:
    key, model = str(loc[-1]), model_at(kind, loc[:-1])
    if model is None:
        return "unknown field"
    refused: Mapping[str, str] = getattr(model, "refused", {})
    if key in refused:
        return refused[key]
    names = field_names(model)
    if ":" in key and key.partition(":")[0] in names:
        return f"unknown field; write a space after the colon: '{key.partition(':')[0]}: {key.partition(':')[2]}'"
    camel = to_camel(key)
    elsewhere = None if camel in names else find_field(kind, key) or find_field(kind, camel)
    if elsewhere is not None:
        return f"unknown field; did you mean '{dotted(elsewhere)}'?"
    return f"unknown field{did_you_mean(key, names) or f'; {_where(loc)} takes {listed(names)}'}"


def _where(loc: Loc) -> str:
    return f"'{dotted(loc[:-1])}'" if loc[:-1] else "the object"


def _missing(kind: type[Kind], loc: Loc) -> str:
    info = field_at(kind, loc)
    description = info.description.rstrip(".") if info is not None and info.description else ""
    return f"required, but missing ({description})" if description else "required, but missing"


def _shortened(text: str) -> str:
    return text if len(text) <= 60 else f"{text[:57]}..."


def _wrong_type(expected: str) -> "_Sentence":
    def sentence(value: object, _: Mapping[str, Any]) -> str:
        return f"expected {expected}, found {found(value)}{_quotes(expected, value)}"

    return sentence


def _bare(value: object) -> str:
    return repr(_shortened(value)) if isinstance(value, str) else found(value)


def _quotes(expected: str, value: object) -> str:
    """Return advice for the two common mistakes with YAML's quotes, else empty text."""
    if expected == "text" and isinstance(value, bool | int | float):
        return "; put it in quotes"
    if expected.endswith("number") and isinstance(value, str) and _is_number(value):
        return "; remove the quotes"
    return ""


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _bound(words: str, key: str) -> "_Sentence":
    return lambda value, ctx: f"must be {words} {_plain(ctx[key])}, found {_plain(value)}"


def _plain(number: float) -> str:
    return str(int(number)) if float(number).is_integer() else str(number)


def _choice(value: object, ctx: Mapping[str, Any]) -> str:
    choices = ctx["expected"].replace(" or ", ", ").replace("'", "").split(", ")
    hint = did_you_mean(value, choices) if isinstance(value, str) else ""
    return f"must be one of {', '.join(choices)}; found {_bare(value)}{hint}"


def _length(words: str, key: str, units: tuple[str, str]) -> "_Sentence":
    def sentence(value: Any, ctx: Mapping[str, Any]) -> str:
        return f"must have {words} {ctx[key]} {units[ctx[key] != 1]}, found {len(value)}"

    return sentence


_CHARACTERS = ("character", "characters")
_ENTRIES = ("entry", "entries")
_Sentence = Callable[[Any, Mapping[str, Any]], str]
_SENTENCES: dict[str, _Sentence] = {
    "int_type": _wrong_type("a whole number"),
    "int_from_float": _wrong_type("a whole number"),
    "float_type": _wrong_type("a number"),
    "finite_number": _wrong_type("a finite number"),
    "string_type": _wrong_type("text"),
    "bool_type": _wrong_type("true or false"),
    "tuple_type": _wrong_type("a list"),
    "list_type": _wrong_type("a list"),
    "dict_type": _wrong_type("a mapping of keys to values"),
    "greater_than": _bound("more than", "gt"),
    "greater_than_equal": _bound("at least", "ge"),
    "less_than": _bound("less than", "lt"),
    "less_than_equal": _bound("at most", "le"),
    "literal_error": _choice,
    "string_too_short": _length("at least", "min_length", _CHARACTERS),
    "string_too_long": _length("at most", "max_length", _CHARACTERS),
    "too_short": _length("at least", "min_length", _ENTRIES),
    "too_long": _length("at most", "max_length", _ENTRIES),
    "string_pattern_mismatch": lambda value, ctx: f"must be {expected_text(ctx['pattern'])}; found {_bare(value)}",
}
