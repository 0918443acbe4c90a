"""Generation requests of this replica: accept, send heartbeats, answer or fail.

A request waits until its deadline. Each `keep` message of its sandbox starts the deadline anew; a request
without one is dropped. The engine has no time limit for a turn: the sandbox judges from the heartbeats whether
it takes too long.

A request is identified by job, agent, episode, turn number, and a hash of its content. A duplicate of a running
request joins it. For `REMEMBERED_S` after the end, a duplicate gets the same answer. Later duplicates are
answered from the turns stream (`generation`), which also refuses a request of the same name with other content.
"""

import asyncio
import logging
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from marlaas_api import wire
from marlaas_api.blobs import BlobUnavailable
from marlaas_api.bus import Bus, BusUnavailable
from marlaas_api.errors import MarlaasError, Permanent
from marlaas_api.messages import CancelRequest, GenerateReply, GenerateRequest, KeepRequest, ReplyPhase, Turn
from marlaas_api.names import request_id
from marlaas_api.wire import unpack_ids
from marlaas_worker.role import RoleContext
from marlaas_worker.rollout.generation import RequestStage
from marlaas_worker.rollout.histories import key_of
from marlaas_worker.rollout.policies import NotAdmitted
from marlaas_worker.rollout.text_limits import num_characters

HEARTBEAT_S = 1.0
LONGEST_DEADLINE_S = 3600.0
REMEMBERED_S = 300.0
REMEMBERED_MOST = 100_000
MOST_INBOXES = 16
MOST_CHARACTERS = 64 << 20
"""Most characters of request text that one job may have in progress."""
_WAITS = (NotAdmitted, BusUnavailable, BlobUnavailable)
"""Errors of the platform: the reply has `waits`. Every other error is a failure of the turn itself."""
_log = logging.getLogger(__name__)

Play = Callable[[GenerateRequest, RequestStage], Awaitable[Turn]]
Question = tuple[str, str, str, str, int, int]


@dataclass(slots=True)
class _Flight:
    """A request in progress.

    Attributes:
        until: latest deadline of all duplicates, on the loop's clock.
        inboxes: reply subjects of all duplicates, the latest last.
    """

    request: GenerateRequest
    until: float
    inboxes: dict[str, None]
    stage: RequestStage = field(default_factory=RequestStage)
    task: asyncio.Task[None] | None = None
    timeout: asyncio.Timeout | None = None


class Requests:
    """All requests of this replica. `tasks` owns the tasks of the requests in progress."""

    def __init__(self, context: RoleContext, play: Play, tasks: asyncio.TaskGroup) -> None:
        self._bus: Bus = context.bus
        self._replica = context.name
        self._play = play
        self._tasks = tasks
        self._flights: dict[Question, _Flight] = {}
        self._characters: Counter[str] = Counter()
        self._under_way: set[asyncio.Task[None]] = set()
        self._answered: OrderedDict[Question, tuple[float, bytes]] = OrderedDict()
        self._idle = asyncio.Event()
        self._idle.set()
        self._closed = False

    async def accept(self, request: GenerateRequest, inbox: str) -> None:
        """Start a request, join a running duplicate, send the known answer, or refuse. Returns once the reply was sent."""
        key, now = _question(request), _clock()
        if (answer := self._known_answer(key, now)) is not None:
            await self._send(inbox, answer)
            return
        if self._closed:
            await self._send(inbox, self._no_place(request, f"replica {self._replica} is stopping"))
            return
        if (flight := self._flights.get(key)) is not None:
            self._join(flight, inbox, request.deadline_s)
        elif self._characters[request.ref.key] > MOST_CHARACTERS:
            await self._send(inbox, self._no_place(request, "its job has too much text under way"))
            return
        else:
            self._depart(key, _Flight(request, now + min(request.deadline_s, LONGEST_DEADLINE_S), {inbox: None}))
        await self._send(inbox, self._reply(request, ReplyPhase.ACCEPTED))

    def cancel(self, cancel: CancelRequest) -> None:
        """Cancel an episode's requests; generations that the engine has begun are aborted."""
        for flight in self._flights_of(cancel):
            if flight.task is not None:
                flight.task.cancel()

    def keep(self, keep: KeepRequest) -> None:
        """Restart the deadlines of an episode's requests."""
        for flight in self._flights_of(keep):
            _prolong(flight, flight.request.deadline_s)

    async def beat(self) -> None:
        """Send a heartbeat every second for each request in progress, until cancelled."""
        while True:
            await asyncio.sleep(HEARTBEAT_S)
            for flight in list(self._flights.values()):
                since = flight.stage.generating_since
                running_s = None if since is None else _clock() - since
                beat = self._reply(flight.request, ReplyPhase.HEARTBEAT, running_s=running_s, doing=str(flight.stage))
                await self._tell(flight, beat)

    def close(self) -> None:
        """Refuse new requests from now on."""
        self._closed = True

    async def drain(self, bound_s: float) -> None:
        """Refuse new requests and wait for those in progress.

        After `bound_s` seconds the remaining requests are cancelled, with a retryable failure as their answer,
        so that sandboxes send them to another replica.
        """
        self.close()
        try:
            async with asyncio.timeout(bound_s):
                await self._idle.wait()
        except TimeoutError:
            await self._end_all()

    def _known_answer(self, key: Question, now: float) -> bytes | None:
        at, answer = self._answered.get(key, (0.0, None))
        return answer if answer is not None and now - at < REMEMBERED_S else None

    def _depart(self, key: Question, flight: _Flight) -> None:
        self._flights[key] = flight
        self._characters[flight.request.ref.key] += num_characters(flight.request)
        self._idle.clear()
        task = self._tasks.create_task(self._fly(key, flight), name=f"turn {request_id(key[3], key[4])}")
        flight.task = task
        self._under_way.add(task)
        task.add_done_callback(lambda _: self._over(key, flight, task))

    def _flights_of(self, episode: CancelRequest | KeepRequest) -> list[_Flight]:
        names = (episode.namespace, episode.job, episode.agent, episode.episode)
        return [flight for key, flight in self._flights.items() if key[:4] == names]

    def _join(self, flight: _Flight, inbox: str, deadline_s: float) -> None:
        flight.inboxes.pop(inbox, None)
        flight.inboxes[inbox] = None
        while len(flight.inboxes) > MOST_INBOXES:
            del flight.inboxes[next(iter(flight.inboxes))]
        _prolong(flight, deadline_s)

    async def _fly(self, key: Question, flight: _Flight) -> None:
        answer = await self._answer(flight)
        del self._flights[key]  # Before the answer is sent: a duplicate that joined later would get no answer.
        encoded = wire.encode(answer)
        if answer.phase is ReplyPhase.RESULT:
            self._remember(key, encoded)
        await self._tell(flight, encoded)

    def _over(self, key: Question, flight: _Flight, task: asyncio.Task[None]) -> None:
        if self._flights.get(key) is flight:
            del self._flights[key]
        self._under_way.discard(task)
        self._characters[flight.request.ref.key] -= num_characters(flight.request)
        self._characters += Counter()  # Removes jobs without requests in progress.
        if not self._under_way:
            self._idle.set()

    async def _answer(self, flight: _Flight) -> GenerateReply:
        """Play the turn and return its result or failure. Only a cancellation is raised."""
        request = flight.request
        try:
            async with asyncio.timeout_at(flight.until) as flight.timeout:
                return self._result(request, await self._play(request, flight.stage))
        except TimeoutError:
            text = f"the time for turn {request_id(request.episode, request.turn)} was over while {flight.stage}"
            return self._failed(request, text, retryable=True, waits=True)
        except MarlaasError as error:
            retryable, waits = not isinstance(error, Permanent), isinstance(error, _WAITS)
            return self._failed(request, str(error), retryable=retryable, waits=waits)
        except Exception as error:
            _log.exception("turn %s of %s", request.turn, request.episode)
            return self._failed(request, f"replica {self._replica}: {error!r}", retryable=True)

    def _remember(self, key: Question, answer: bytes) -> None:
        now = _clock()
        self._answered[key] = (now, answer)
        while self._answered:
            oldest, (at, _) = next(iter(self._answered.items()))
            if now - at < REMEMBERED_S and len(self._answered) <= REMEMBERED_MOST:
                return
            del self._answered[oldest]

    async def _end_all(self) -> None:
        flights = list(self._flights.values())
        _log.warning("%d requests did not end in time; they are asked for elsewhere", len(flights))
        for flight in flights:
            text = f"replica {self._replica} is stopping while {flight.stage}"
            await self._tell(flight, self._no_place(flight.request, text))
            if flight.task is not None:
                flight.task.cancel()
        await self._idle.wait()

    def _result(self, request: GenerateRequest, turn: Turn) -> GenerateReply:
        return GenerateReply(
            request=request_id(request.episode, request.turn),
            phase=ReplyPhase.RESULT,
            replica=self._replica,
            text=turn.text,
            stop_reason=turn.stop_reason,
            num_tokens=len(unpack_ids(turn.output_ids)),
            num_prompt_tokens=turn.meter.prompt_tokens,
        )

    def _failed(self, request: GenerateRequest, error: str, *, retryable: bool, waits: bool = False) -> GenerateReply:
        name = request_id(request.episode, request.turn)
        failed = GenerateReply(request=name, phase=ReplyPhase.FAILED, replica=self._replica, error=error)
        return failed.model_copy(update={"retryable": retryable, "waits": waits})

    def _no_place(self, request: GenerateRequest, why: str) -> bytes:
        return wire.encode(self._failed(request, why, retryable=True, waits=True))

    def _reply(
        self, request: GenerateRequest, phase: ReplyPhase, running_s: float | None = None, doing: str = ""
    ) -> bytes:
        name = request_id(request.episode, request.turn)
        reply = GenerateReply(request=name, phase=phase, replica=self._replica, running_s=running_s, doing=doing)
        return wire.encode(reply)

    async def _tell(self, flight: _Flight, reply: bytes) -> None:
        for inbox in list(flight.inboxes):
            await self._send(inbox, reply)

    async def _send(self, inbox: str, reply: bytes) -> None:
        """Send a reply once; if it is lost, the sandbox sends its request again."""
        try:
            await self._bus.send(inbox, reply)
        except MarlaasError as error:
            _log.warning("could not answer on %s: %s", inbox, error)


def _prolong(flight: _Flight, deadline_s: float) -> None:
    """Extend a request's deadline to `deadline_s` from now, unless it is later already.

    A request whose timeout has expired is not extended: its sandbox sends it again.
    """
    flight.until = max(flight.until, _clock() + min(deadline_s, LONGEST_DEADLINE_S))
    if flight.timeout is not None and not flight.timeout.expired():
        flight.timeout.reschedule(flight.until)


def _question(request: GenerateRequest) -> Question:
    return (*key_of(request, request.turn), hash((request.parent, request.append, request.tools)))


def _clock() -> float:
    return asyncio.get_running_loop().time()
