"""Errors that keep an object's actions from being executed: when to report them and when to retry. Pure.

A refusal is reported at once and retried after 30 s. A transient error is reported once it has lasted
`LASTING_S`; the work queue sets the interval of its retries.
"""

from dataclasses import dataclass

from marlaas_api.bus import BusRefused, BusUnavailable
from marlaas_api.errors import MarlaasError
from marlaas_api.reasons import Reason
from marlaas_operator.cluster import Conflict, Forbidden, Invalid, NoAnswer, Target, TooMany
from marlaas_operator.job_documents import Stale
from marlaas_operator.plan import Action

REFUSED_AGAIN_S = 30.0
LASTING_S = 10.0

Actions = tuple[Action, ...]


@dataclass(slots=True)
class _Failure:
    """Last error of an object.

    Attributes:
        since: start of the failures, unix seconds.
        actions: refused actions, not retried before `until` (unix seconds).
    """

    since: float
    error: MarlaasError
    actions: Actions = ()
    until: float = 0.0


class FailureBackoff:
    """Current errors of all objects."""

    def __init__(self) -> None:
        self._known: dict[Target, _Failure] = {}

    def met(self, target: Target, error: MarlaasError, now: float) -> None:
        """Record the error of an action."""
        known = self._known.get(target)
        self._known[target] = _Failure(known.since if known is not None else now, error)

    def rest(self, target: Target, actions: Actions, now: float) -> None:
        """Do not retry these actions for `REFUSED_AGAIN_S`, because they were refused."""
        known = self._known[target]
        known.actions, known.until = actions, now + REFUSED_AGAIN_S

    def rests_s(self, target: Target, actions: Actions, now: float) -> float | None:
        """Return for how many seconds the actions must not be retried; None if they may be."""
        known = self._known.get(target)
        if known is None or known.actions != actions:
            return None
        left_s = known.until - now
        return left_s if 0 < left_s <= REFUSED_AGAIN_S else None  # longer: the clock was set back

    def over(self, target: Target) -> bool:
        """Forget the object's error: all actions succeeded, or the object is gone. Return whether there was one."""
        return self._known.pop(target, None) is not None

    def told(self, target: Target, now: float) -> tuple[Reason, str] | None:
        """Return reason and message of the object's error for its status.

        None if there is no error, or a transient one that has not lasted `LASTING_S`.
        """
        known = self._known.get(target)
        if known is None or not (is_refusal(known.error) or now - known.since >= LASTING_S):
            return None
        of_bus = isinstance(known.error, BusRefused | BusUnavailable)
        return Reason.BUS_UNAVAILABLE if of_bus else Reason.POD_REFUSED, str(known.error)


def is_refusal(error: MarlaasError) -> bool:
    """Return whether a retry would be refused again."""
    return isinstance(error, Invalid | Forbidden | BusRefused)


def is_passing(error: MarlaasError) -> bool:
    """Return whether the error is transient and says nothing about the object: observe again, or wait."""
    return isinstance(error, Conflict | Stale | TooMany | NoAnswer)
