"""Base classes of the messages."""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Strict
from pydantic.alias_generators import to_camel

from marlaas_api.names import JobRef

Integer = Annotated[int, Strict()]
"""An integer in a message that a tenant's code may write. Without Strict, pydantic also reads it from text, of any size;
msgpack has no integers above 64 bits, so a reader could not serialize the message again."""


class BusMessage(BaseModel):
    """Base of every message on the bus; the class name is its type tag (see `marlaas_api.wire`).

    Readers ignore fields that they do not know, because the writer may be of a newer release.
    """

    model_config = ConfigDict(frozen=True, extra="ignore")


class JobMessage(BusMessage):
    """A message of one job. The uid separates the job from an earlier one of the same name: readers ignore other uids."""

    namespace: str
    job: str
    uid: str

    @property
    def ref(self) -> JobRef:
        """The job of the message."""
        return JobRef(self.namespace, self.job, self.uid)


class SpecPart(BaseModel):
    """A part of a job's or a pool's document: what readers need of the part of a manifest with the same field names.

    Unknown fields are ignored. Bounds are not checked again: the API server or `marlaas run` has checked the manifest.

    Writers leave out fields that have their default. So a default here never changes, also when the manifest's does;
    a new field needs the default that keeps the behaviour of documents without it.
    """

    model_config = ConfigDict(
        # The camelCase names of manifests: the command shows them to people, and JSON files may have them.
        alias_generator=to_camel,
        validate_by_name=True,
        validate_by_alias=True,
        frozen=True,
        extra="ignore",
    )
