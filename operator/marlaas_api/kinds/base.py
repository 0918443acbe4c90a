"""Shared parts of the kinds: camelCase keys, strictness, the object envelope, and text types."""

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal, TypeVar, cast

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StringConstraints,
    WithJsonSchema,
)
from pydantic.alias_generators import to_camel
from pydantic.config import JsonDict

from marlaas_api.names import DNS_LABEL
from marlaas_api.numeric import QUANTITY

GROUP = "marlaas.dev"
VERSION = "v1alpha1"
API_VERSION = f"{GROUP}/{VERSION}"

_DNS_SUBDOMAIN = r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*$"

_EXPECTED: dict[str, str] = {}

T = TypeVar("T")


def matching(pattern: str, words: str, max_length: int) -> StringConstraints:
    """Constrain a text to a pattern with the same meaning in RE2 (the API server) and Rust (pydantic).

    words: description of the pattern for error messages (`expected_text`).
    """
    _EXPECTED[pattern] = words
    return StringConstraints(pattern=pattern, max_length=max_length)


def expected_text(pattern: str) -> str:
    """Return the description of a pattern, for error messages."""
    return _EXPECTED.get(pattern, f"text like {pattern}")


def _quantity_text(value: object) -> object:
    """Convert an integer quantity such as `cpu: 2` to text, as Kubernetes does; only whole numbers of 64 bits."""
    return str(value) if isinstance(value, int) and not isinstance(value, bool) and value < 2**63 else value


def _distinct(values: tuple[T, ...]) -> tuple[T, ...]:
    twice = next((value for at, value in enumerate(values) if value in values[:at]), None)
    if twice is not None:
        raise ValueError(f"{twice!r} is listed twice")
    return values


DnsLabel = Annotated[
    str,
    matching(
        DNS_LABEL, "lower-case letters, digits and '-', beginning and ending with a letter or digit (no dots)", 63
    ),
]
Quantity = Annotated[
    str,
    BeforeValidator(_quantity_text),
    matching(QUANTITY, "a quantity, for example 512Mi, 2 or 0.5", 32),
    WithJsonSchema(
        {
            "anyOf": [{"type": "integer"}, {"type": "string"}],
            "pattern": QUANTITY,
            "maxLength": 32,
            "minimum": 0,
            "x-kubernetes-int-or-string": True,
        }
    ),
]
ObjectName = Annotated[
    str,
    matching(_DNS_SUBDOMAIN, "a Kubernetes name: lower-case letters, digits, '-' and single dots between them", 253),
]
"""Name of an object that is not of our kinds, for example a Secret; dots are allowed. Names of our kinds are DnsLabels."""

PathText = Annotated[str, StringConstraints(min_length=1, max_length=4096)]
Distinct = Annotated[
    tuple[T, ...], AfterValidator(_distinct), Field(json_schema_extra={"x-kubernetes-list-type": "set"})
]


def rules(*pairs: tuple[str, str]) -> JsonDict:
    """Schema extension with CEL rules for the API server. Each pair is a rule and the message for objects that violate it."""
    return {"x-kubernetes-validations": [{"rule": rule, "message": message} for rule, message in pairs]}


def list_map(*keys: str) -> JsonDict:
    """Schema extension for a list of objects with unique keys, by which the API server merges them."""
    return {"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": list(keys)}


NO_CHANGE = ("self == oldSelf", "cannot change once the job exists; delete the job and create a new one")
FIXED = rules(NO_CHANGE)
"""Schema extension of a field that cannot change after the object is created."""


def unchanged(name: str, *inner: str) -> str:
    """Return the rule that an optional field stays absent or unchanged.

    `self.?name == oldSelf.?name` is not used, because the API server cannot bound its cost.
    """
    same = " && ".join(f"self.{path} == oldSelf.{path}" for path in (inner or (name,)))
    return f"(has(self.{name}) ? has(oldSelf.{name}) && {same} : !has(oldSelf.{name}))"


class Spec(BaseModel):
    """A part of a manifest: camelCase keys, unknown keys refused, immutable after parsing.

    refused: keys, in the manifest's spelling, that users expect here but that do not exist, each with the reason.
    """

    model_config = ConfigDict(
        alias_generator=to_camel,
        validate_by_name=True,
        validate_by_alias=True,
        frozen=True,
        extra="forbid",
        allow_inf_nan=False,
    )
    refused: ClassVar[Mapping[str, str]] = {}


def refuse(schema: JsonDict, model: type[BaseModel]) -> None:
    """Schema extension that declares a model's refused keys: the API server then rejects them instead of pruning them silently."""
    refused: Mapping[str, str] = getattr(model, "refused", {})
    properties = cast(JsonDict, schema["properties"])
    for key, sentence in refused.items():
        properties[key] = {"type": "number", "description": f"{sentence[0].upper()}{sentence[1:]}."}
    schema |= rules(*((f"!has(self.{key})", f"{key} is {sentence}") for key, sentence in refused.items()))


class ObjectMeta(BaseModel):
    """The fields of Kubernetes' metadata that we read; the API server keeps the others.

    The API server sets uid and generation; a manifest in a file has none.
    """

    model_config = ConfigDict(frozen=True, extra="ignore")
    name: DnsLabel = Field(
        description="Name of the object: lower-case letters, digits and '-', at most 63, no dots (it is part of subjects)."
    )
    namespace: DnsLabel = "default"
    labels: dict[str, str] = Field(default_factory=dict)
    annotations: dict[str, str] = Field(default_factory=dict)
    uid: str | None = None
    generation: int = 1


class Kind(Spec):
    """A whole object, from a manifest or from the API server."""

    api_version: Literal["marlaas.dev/v1alpha1"]
    metadata: ObjectMeta
