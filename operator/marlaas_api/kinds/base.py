"""What the kinds share: camelCase on the outside, strictness, and the object envelope."""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints
from pydantic.alias_generators import to_camel

from marlaas_api.names import DNS_LABEL

GROUP = "marlaas.dev"
VERSION = "v1alpha1"
API_VERSION = f"{GROUP}/{VERSION}"

DnsLabel = Annotated[str, StringConstraints(pattern=DNS_LABEL, max_length=63)]
Quantity = Annotated[str, StringConstraints(pattern=r"^[0-9]+(\.[0-9]+)?(m|k|M|G|T|Ki|Mi|Gi|Ti)?$")]

_SUFFIXES = {
    "": 1,
    "m": 1e-3,
    "k": 1e3,
    "M": 1e6,
    "G": 1e9,
    "T": 1e12,
    "Ki": 2**10,
    "Mi": 2**20,
    "Gi": 2**30,
    "Ti": 2**40,
}


class Spec(BaseModel):
    """A part of a manifest: camelCase keys, unknown keys refused, immutable once parsed."""

    model_config = ConfigDict(
        alias_generator=to_camel, validate_by_name=True, validate_by_alias=True, frozen=True, extra="forbid"
    )


class ObjectMeta(BaseModel):
    """The part of Kubernetes' metadata that we read; the rest is kept by the API server, not by us."""

    model_config = ConfigDict(frozen=True, extra="ignore")
    name: DnsLabel
    namespace: DnsLabel = "default"
    labels: dict[str, str] = Field(default_factory=dict)
    annotations: dict[str, str] = Field(default_factory=dict)


class Kind(Spec):
    """A whole object as it stands in a manifest."""

    api_version: Literal["marlaas.dev/v1alpha1"]
    metadata: ObjectMeta


def quantity(text: str) -> float:
    """Value of a Kubernetes quantity: bytes for memory, cores for CPU."""
    digits = text.rstrip("mkMGTi")
    return float(digits) * _SUFFIXES[text[len(digits) :]]
