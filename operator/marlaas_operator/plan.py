"""What is to be done about one object: values that a policy returns and the shell performs.

Invariant: actions are in an order in which a crash between any two of them is harmless: planning anew from what is so then gives
the rest. The shell performs them one by one, stops at the first error and plans again.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from marlaas_api.messages import JobDocument

Manifest = Mapping[str, Any]
"""A Kubernetes object as the API server takes and gives it."""


@dataclass(frozen=True, slots=True)
class Apply:
    """Server-side apply of a whole desired object, forced, with our field manager."""

    manifest: Manifest


@dataclass(frozen=True, slots=True)
class Delete:
    """Delete an owned object in the background; that it is gone is success. uid: only this very object, None where we cannot know it
    (Secrets are never read)."""

    kind: str
    namespace: str
    name: str
    uid: str | None = None


@dataclass(frozen=True, slots=True)
class DeleteObject:
    """Delete the planned object itself (ttlSecondsAfterFinished), if it still has this uid."""

    uid: str


@dataclass(frozen=True, slots=True)
class AddFinalizer:
    """Put our finalizer on the planned object, by a metadata patch."""

    finalizer: str


@dataclass(frozen=True, slots=True)
class RemoveFinalizer:
    """Take our finalizer off; the object may then go. Always the last action."""

    finalizer: str


@dataclass(frozen=True, slots=True)
class WriteDocument:
    """Put the job's document on the bus. replaces: the document that was observed there (None: the key was absent), so that the shell can
    refuse to overwrite a newer one and plan again."""

    document: JobDocument
    replaces: JobDocument | None


Action = Apply | Delete | DeleteObject | AddFinalizer | RemoveFinalizer | WriteDocument


@dataclass(frozen=True, slots=True)
class Event:
    """One sentence of the object's story, for `kubectl describe`; one per real transition."""

    type: Literal["Normal", "Warning"]
    reason: str
    message: str


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything that follows from one snapshot; the empty plan means that all is as it should be.

    status: None when nothing is to be written; otherwise what to put under `status` in one merge patch: the whole computed status, with None for
    what is to be removed. urgent: the status says something new of phase, reason or conditions and is written at once; otherwise only figures have moved, and the
    shell writes it at most once a second. events: emitted after the status was written, and only then. requeue_s: look again after this many
    seconds even if nothing is heard; None: only then.
    """

    actions: tuple[Action, ...] = ()
    status: Mapping[str, Any] | None = None
    urgent: bool = False
    events: tuple[Event, ...] = ()
    requeue_s: float | None = None

    @property
    def empty(self) -> bool:
        """Nothing is to be done now."""
        return not self.actions and self.status is None and not self.events
