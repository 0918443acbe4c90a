"""Where requests come in: a share of the pool's, passed on to the episode's owner, and what others pass on to this replica.

What a sandbox writes into a request counts only if the subject says the same: the subject is what its permissions are about. They are not
about where it wants its answer, so that is looked at here too.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack

from marlaas_api import subjects, wire
from marlaas_api.bus import Request
from marlaas_api.errors import MarlaasError, Permanent
from marlaas_api.messages import CancelRequest, GenerateRequest, KeepRequest, ReplicaReport
from marlaas_worker.bucket_cache import BucketCache
from marlaas_worker.role import RoleContext
from marlaas_worker.rollout.requests import Requests
from marlaas_worker.rollout.routing import owner

QUEUE = "rollout"
Handler = Callable[[Request], Awaitable[None]]
_Message = GenerateRequest | CancelRequest | KeepRequest
_log = logging.getLogger(__name__)


class Reception:
    """Listens for the jobs that it is told to. `ready` says whether this replica can serve."""

    def __init__(self, context: RoleContext, pool: str, requests: Requests, ready: Callable[[], bool]) -> None:
        self._bus = context.bus
        self._me = context.name
        self._pool = pool
        self._requests = requests
        self._ready = ready
        self._replicas = BucketCache(self._bus, subjects.REPLICAS, ReplicaReport, lambda: None, f"rollout.{pool}.")
        self._listening: dict[str, AsyncExitStack] = {}

    async def follow(self) -> None:
        """Keep up with which replicas live, until cancelled."""
        await self._replicas.follow()

    async def listen_to(self, wanted: set[str]) -> None:
        """Listen to these generation subjects, to what other replicas pass on, and to nothing else.

        Always called by the same task. Raises BusUnavailable; what is open by then stays open.
        """
        own = subjects.engine(self._pool, self._me)
        for subject in self._listening.keys() - wanted - {own}:
            await self._listening.pop(subject).aclose()
        if own not in self._listening:
            await self._open(own, self._on_passed_on, "")
        for subject in wanted - self._listening.keys():
            await self._open(subject, self._on_request, QUEUE)

    async def close(self) -> None:
        """Listen to nothing any more; called by the task that listened."""
        while self._listening:
            _, stack = self._listening.popitem()
            await stack.aclose()

    def live(self) -> set[str]:
        """Names of the replicas that can serve, as far as this one knows; itself if there is no other."""
        now = asyncio.get_running_loop().time()
        reports = ((report, now - at) for _, report, at in self._replicas.items())
        names = {report.replica for report, age_s in reports if report.ready and age_s < subjects.REPLICA_TTL_S}
        names.discard(self._me)
        return names | {self._me} if self._ready() or not names else names

    async def _open(self, subject: str, handler: Handler, queue: str) -> None:
        stack = AsyncExitStack()
        await stack.enter_async_context(self._bus.listen(subject, handler, queue))
        self._listening[subject] = stack

    async def _on_request(self, request: Request) -> None:
        message = _parse(request)
        if message is None:
            return
        if request.subject != subjects.generation(message.namespace, message.job, message.agent):
            _log.error(
                "a request on %s claims to be of %s, agent %s: ignored", request.subject, message.ref, message.agent
            )
        elif not isinstance(message, GenerateRequest):
            await self._tell_everybody(message)
        elif not subjects.is_reply_of(message.namespace, message.job, request.reply):
            _log.error("a request on %s wants its answer on %s: ignored", request.subject, request.reply)
        elif (name := owner(message.episode, self.live())) == self._me:
            await self._requests.accept(message, request.reply)
        else:
            await self._pass_on(name, message.model_copy(update={"reply_to": request.reply}))

    async def _tell_everybody(self, message: CancelRequest | KeepRequest) -> None:
        """Also an earlier owner, which may still be at it."""
        self._obey(message)
        for name in self.live() - {self._me}:
            await self._pass_on(name, message)

    def _obey(self, message: CancelRequest | KeepRequest) -> None:
        if isinstance(message, CancelRequest):
            self._requests.cancel(message)
        else:
            self._requests.keep(message)

    async def _pass_on(self, name: str, message: _Message) -> None:
        """What does not arrive is asked for again."""
        try:
            await self._bus.send(subjects.engine(self._pool, name), wire.encode(message))
        except MarlaasError as error:
            _log.warning("could not pass a request on to %s: %s", name, error)

    async def _on_passed_on(self, request: Request) -> None:
        message = _parse(request)
        if isinstance(message, CancelRequest | KeepRequest):
            self._obey(message)
        elif isinstance(message, GenerateRequest):
            inbox = message.reply_to or request.reply
            if subjects.is_reply_of(message.namespace, message.job, inbox):
                await self._requests.accept(message, inbox)


def _parse(request: Request) -> _Message | None:
    try:
        message = wire.decode(request.data)
    except Permanent as error:
        _log.error("unreadable request on %s: %s", request.subject, error)
        return None
    return message if isinstance(message, GenerateRequest | CancelRequest | KeepRequest) else None
