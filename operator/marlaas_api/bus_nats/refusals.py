"""The server's refusals of subjects and of the user. This module has no connection.

The server reports a refusal to the connection and not to the call: nats-py passes it to a callback, and the call times
out. This module turns it into an error of the call or subscription that used the subject.
"""

import asyncio
import logging
import re

from marlaas_api.bus import BusRefused
from marlaas_api.bus_nats.dial import Dial
from marlaas_api.bus_nats.routes import Route, Routes
from marlaas_api.bus_nats.verdicts import SubjectForbidden

_REFUSED = re.compile(r'permissions violation for (publish|subscription)[^"]*"([^"]+)"')
_REJECTED = ("authorization", "authentication")
_MOST_REMEMBERED = 1000

logger = logging.getLogger("marlaas.bus")


class Refusals:
    """The refusals of one connection.

    subscriptions: the open subscriptions, each with the errors against it. rejected: resolves if the server rejects
    this user while the connection is `opening`.
    """

    def __init__(self, dial: Dial, routes: Routes) -> None:
        self._dial = dial
        self._routes = routes
        self._subjects: dict[str, BusRefused] = {}
        self._complained = False
        self.opening = True
        self.rejected: asyncio.Future[BusRefused] = asyncio.get_running_loop().create_future()
        self.subscriptions: dict[Route, list[Exception]] = {}
        self.last: Exception | None = None

    def hear(self, error: Exception, *, connected: bool) -> bool:
        """Process an error that the server reported; return False if it is not a refusal."""
        self.last = error
        text = str(error).lower()
        refused = _REFUSED.search(text)
        if refused is not None:
            self._refuse(*refused.groups())
        elif not connected and _rejects(error):
            self._turn_away(error)
        else:
            return False
        return True

    def check(self, subject: str) -> None:
        """Raise SubjectForbidden if publishing to this subject was refused before."""
        if subject.lower() in self._subjects:
            raise self._subjects[subject.lower()]

    def reject(self, error: Exception) -> None:
        """Record the reason why the connection cannot be opened; retryable errors are ignored."""
        if not self.rejected.done() and isinstance(error, BusRefused):
            self.rejected.set_result(error)

    def forget(self) -> None:
        """Clear recorded refusals for a new connection: the user's permissions may have changed."""
        self._subjects.clear()
        self._complained = False

    def unreachable(self) -> str:
        """Return the reason why there is no connection, and advice."""
        if self.last is not None and _rejects(self.last):
            return self._rejection(self.last)
        why = f" ({self.last})" if self.last is not None else ""
        return f"NATS at {self._dial.where} cannot be reached{why}: is it running?"

    def _refuse(self, act: str, subject: str) -> None:
        """Fail all routes that use the refused subject (the server quotes it; nats-py turns it to lower case)."""
        users = list(self.subscriptions) if act == "subscription" else self._routes.all()
        hit = [route for route in users if route.subject.lower() == subject]
        name = hit[0].subject if hit else subject
        verb = "listen" if act == "subscription" else "publish"
        error = SubjectForbidden(
            f'NATS does not let {self._dial.name} {verb} to "{name}": grant that permission to its user'
        )
        logger.error("%s", error)
        for route in hit:
            self.subscriptions.get(route, []).append(error)
            route.fail(error)
        if act == "publish" and len(self._subjects) < _MOST_REMEMBERED:
            self._subjects[subject] = error

    def _turn_away(self, error: Exception) -> None:
        """Handle a rejection of the user by the server.

        While the connection is opening, the opener gets the error. Later it is logged once per connection, because
        newer credentials may follow.
        """
        text = self._rejection(error)
        if self.opening:
            self.reject(BusRefused(text))
        elif not self._complained:
            self._complained = True
            logger.error("%s", text)

    def _rejection(self, error: Exception) -> str:
        identity = self._dial.identity
        why = "check its credentials" if identity is None else identity.complaint()
        return f"NATS at {self._dial.where} rejects {self._dial.name}: {error}: {why}"


def _rejects(error: Exception) -> bool:
    return any(word in str(error).lower() for word in _REJECTED)
