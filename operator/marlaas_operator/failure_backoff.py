"""What keeps an object's actions from being done: since when, in whose words, and when the same is asked for again. Pure.

What is refused for good is told at once and asked for again after half a minute. What may pass is told once it lasts; how often it is tried is the
work queue's to say.
"""

from dataclasses import dataclass

from marlaas_api.bus import BusRefused, BusUnavailable
from marlaas_api.errors import MarlaasError
from marlaas_api.reasons import Reason
from marlaas_operator.bus_view import Stale
from marlaas_operator.cluster import Conflict, Forbidden, Invalid, NoAnswer, Target, TooMany
from marlaas_operator.plan import Action

REFUSED_AGAIN_S = 30.0
LASTING_S = 10.0

Actions = tuple[Action, ...]


@dataclass(slots=True)
class _Failure:
    """since, until: unix seconds; actions: those that are left alone until then."""

    since: float
    error: MarlaasError
    actions: Actions = ()
    until: float = 0.0


class FailureBackoff:
    """The troubles of all objects."""

    def __init__(self) -> None:
        self._known: dict[Target, _Failure] = {}

    def met(self, target: Target, error: MarlaasError, now: float) -> None:
        """An action failed."""
        known = self._known.get(target)
        self._known[target] = _Failure(known.since if known is not None else now, error)

    def rest(self, target: Target, actions: Actions, now: float) -> None:
        """Leave these very actions alone for a while: they were refused for good."""
        known = self._known[target]
        known.actions, known.until = actions, now + REFUSED_AGAIN_S

    def rests_s(self, target: Target, actions: Actions, now: float) -> float | None:
        """For how many seconds the actions are still to be left alone; None if they may be tried."""
        known = self._known.get(target)
        if known is None or known.actions != actions:
            return None
        left_s = known.until - now
        return left_s if 0 < left_s <= REFUSED_AGAIN_S else None  # longer: the clock was set back

    def over(self, target: Target) -> bool:
        """Everything was done, or there is nobody any more to do it for; whether there had been trouble."""
        return self._known.pop(target, None) is not None

    def told(self, target: Target, now: float) -> tuple[Reason, str] | None:
        """What to say of it in the object's status; None if there is no trouble, or none that has lasted."""
        known = self._known.get(target)
        if known is None or not (is_refusal(known.error) or now - known.since >= LASTING_S):
            return None
        of_bus = isinstance(known.error, BusRefused | BusUnavailable)
        return Reason.BUS_UNAVAILABLE if of_bus else Reason.POD_REFUSED, str(known.error)


def is_refusal(error: MarlaasError) -> bool:
    """Whether the same would be refused again."""
    return isinstance(error, Invalid | Forbidden | BusRefused)


def is_passing(error: MarlaasError) -> bool:
    """Whether it only means: look again, be patient, or nobody is there who would take a status. It says nothing of the object, unless it lasts."""
    return isinstance(error, Conflict | Stale | TooMany | NoAnswer)
