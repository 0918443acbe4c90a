"""Actions and status for one object: values that a policy returns and the shell executes.

Invariant: a crash between any two actions is harmless: a new plan from the observed state contains the rest.
The shell executes them in order, stops at the first error and plans again.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from marlaas_api.messages import JobDocument

Manifest = Mapping[str, Any]
"""A Kubernetes object in the API server's JSON form."""


@dataclass(frozen=True, slots=True)
class Apply:
    """Server-side apply of a complete desired object, forced, with our field manager."""

    manifest: Manifest


@dataclass(frozen=True, slots=True)
class Delete:
    """Background deletion of an owned object; an absent object counts as success.

    uid: precondition of the deletion; None where the uid is unknown (Secrets are never read).
    """

    kind: str
    namespace: str
    name: str
    uid: str | None = None


@dataclass(frozen=True, slots=True)
class DeleteObject:
    """Deletion of the planned object itself (`ttlSecondsAfterFinished`), if it still has this uid."""

    uid: str


@dataclass(frozen=True, slots=True)
class AddFinalizer:
    """Addition of our finalizer to the planned object, by a metadata patch."""

    finalizer: str


@dataclass(frozen=True, slots=True)
class RemoveFinalizer:
    """Removal of our finalizer, after which Kubernetes may delete the object. Always the last action."""

    finalizer: str


@dataclass(frozen=True, slots=True)
class WriteDocument:
    """Write of the job's document to the bus.

    replaces: the observed document (None: the key was absent). If the bus has another one by now, the write is
    refused and the object planned again.
    """

    document: JobDocument
    replaces: JobDocument | None


Action = Apply | Delete | DeleteObject | AddFinalizer | RemoveFinalizer | WriteDocument


@dataclass(frozen=True, slots=True)
class Event:
    """A sentence for `kubectl describe`; one per transition."""

    type: Literal["Normal", "Warning"]
    reason: str
    message: str


@dataclass(frozen=True, slots=True)
class Plan:
    """All actions that follow from one snapshot; an empty plan means that nothing has to change.

    Attributes:
        status: status as one merge patch, with None for fields to remove; None when nothing is to be written.
        urgent: phase, reason or conditions changed, so the status is written at once. Otherwise only numbers
            changed, and it is written at most once a second.
        events: emitted only after the status was written.
        aside: actions for the job's exporter. Their errors stop no other action and are no error of the job.
        requeue_s: reconcile again after this many seconds even without a change; None: only on a change.
    """

    actions: tuple[Action, ...] = ()
    status: Mapping[str, Any] | None = None
    urgent: bool = False
    events: tuple[Event, ...] = ()
    requeue_s: float | None = None
    aside: tuple[Action, ...] = ()

    @property
    def empty(self) -> bool:
        """Whether there is nothing to do now."""
        return not self.actions and not self.aside and self.status is None and not self.events
