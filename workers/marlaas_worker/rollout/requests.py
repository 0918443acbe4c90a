"""Generation requests of this replica: accept, send heartbeats, answer or fail.

A request that is not answered by its deadline fails. Each `keep` message of its sandbox restarts the deadline. The
engine ends a turn at the job's time limit, with the tokens that it has. The sandbox judges from the heartbeats
whether a turn takes much longer than that.

A request is identified by job, agent, episode, turn number, and a hash of its content. A duplicate of a running
request joins it. For `REMEMBERED_S` after the end, a duplicate gets the same answer. `generation` answers later
duplicates from the turns stream, and refuses a request of the same name with other content.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass, field

from marlaas_api import wire
from marlaas_api.blobs import BlobUnavailable
from marlaas_api.bus import Bus, BusUnavailable
from marlaas_api.errors import MarlaasError, Permanent, Unreadable
from marlaas_api.messages import CancelRequest, GenerateReply, GenerateRequest, KeepRequest, ReplyPhase, Turn
from marlaas_api.names import JobRef, request_id
from marlaas_api.wire import unpack_ids
from marlaas_worker.role import RoleContext, wait_for
from marlaas_worker.rollout.conversation import BadAppend, NoChatTemplate, num_characters
from marlaas_worker.rollout.generation import RequestStage
from marlaas_worker.rollout.policies import NotAdmitted
from marlaas_worker.rollout.scoring import OtherVocabulary
from marlaas_worker.rollout.served_jobs import ServedJobs
from marlaas_worker.rollout.supervised_engine import EngineKilled

HEARTBEAT_S = 1.0
MAX_DEADLINE_S = 3600.0
REMEMBERED_S = 300.0
MAX_INBOXES = 16
_ANSWER_OBJECT_BYTES = 512
MAX_CHARACTERS = 64 << 20
"""Characters of requests (`_size`) that one job may have in progress. A request counts as _REQUEST_CHARACTERS or more,
so about 8,192 requests fit."""
_REQUEST_CHARACTERS = 8192
"""Memory of a request besides its text, in characters: its message object, its asyncio task, and the objects that the task waits on."""
_WAITS = (NotAdmitted, BusUnavailable, BlobUnavailable, Unreadable)
"""Errors that the platform causes: the reply to one sets `GenerateReply.waits`. Every other error is a failure of the turn itself."""
_log = logging.getLogger(__name__)

Play = Callable[[GenerateRequest, RequestStage], Awaitable[Turn]]
RequestKey = tuple[str, str, str, str, int, int]
"""Namespace, job, agent, episode, turn number, and hash of the content."""


@dataclass(slots=True)
class _ActiveRequest:
    """A request in progress, together with its duplicates: requests with the same key.

    Attributes:
        key: identifies the request.
        request: the first message with this key.
        until: latest deadline of all duplicates, on the loop's clock.
        inboxes: reply subjects of all duplicates, the latest last; the values are unused.
        stage: what the request waits for now, or since when the engine generates; sent in heartbeats.
        task: plays the turn and sends the answer.
        timeout: ends the task at `until`; None until the task has started.
    """

    key: RequestKey
    request: GenerateRequest
    until: float
    inboxes: dict[str, None]
    stage: RequestStage = field(default_factory=RequestStage)
    task: asyncio.Task[None] = field(init=False)
    timeout: asyncio.Timeout | None = None


class Requests:
    """Accepts the requests of this replica, sends heartbeats while they are in progress, and answers them.

    Args:
        context: has the bus, and the name of this replica.
        jobs: the served jobs, in which the answers for duplicates of ended requests are cached.
        play: plays a turn, updates the request's stage, and returns the turn's record (`Generation.play`).
        tasks: owns the tasks of the requests in progress.

    Attributes:
        closed: whether new requests are refused.
    """

    def __init__(self, context: RoleContext, jobs: ServedJobs, play: Play, tasks: asyncio.TaskGroup) -> None:
        self._bus: Bus = context.bus
        self._replica = context.name
        self._jobs = jobs
        self._play = play
        self._tasks = tasks
        self._active: dict[RequestKey, _ActiveRequest] = {}
        self._characters: Counter[str] = Counter()
        self._running: set[asyncio.Task[None]] = set()
        self._idle = asyncio.Event()
        self._idle.set()
        self.closed = False

    async def accept(self, request: GenerateRequest, inbox: str) -> None:
        """Start a request, join it to a running duplicate, send the known answer, or refuse it. Returns once a reply was sent.

        inbox: the request's reply subject.
        """
        key, now = _key_of(request), _clock()
        if (answer := self._known_answer(request, key, now)) is not None:
            await self._send(inbox, answer)
            return
        if self.closed:
            await self._send(inbox, self._retry_elsewhere(request, f"replica {self._replica} is stopping"))
            return
        if (active := self._active.get(key)) is not None:
            self._join(active, inbox, request.deadline_s)
        elif self._characters[request.ref.key] > MAX_CHARACTERS:
            why = "its job has too many requests or too much text in progress"
            await self._send(inbox, self._retry_elsewhere(request, why))
            return
        else:
            self._start(_ActiveRequest(key, request, now + min(request.deadline_s, MAX_DEADLINE_S), {inbox: None}))
        await self._send(inbox, self._reply(request, ReplyPhase.ACCEPTED))

    def cancel(self, cancel: CancelRequest) -> None:
        """Cancel the requests of one agent in one episode; generations that the engine has begun are aborted. They get no answer."""
        for active in self._active_of(cancel):
            self._abort(active)

    def keep(self, keep: KeepRequest) -> None:
        """Restart the deadlines of the requests of one agent in one episode."""
        for active in self._active_of(keep):
            _extend_deadline(active, active.request.deadline_s)

    async def cancel_others(self, admitted: Collection[JobRef]) -> None:
        """Cancel the requests of jobs that are not admitted any more, and answer that they may be sent again.

        Replicas unsubscribe from the subjects of such jobs, so `cancel` and `keep` messages of their sandboxes no longer arrive.

        Args:
            admitted: the jobs whose requests go on.
        """
        for active in [one for one in self._active.values() if one.request.ref not in admitted]:
            await self._stop(active, f"job {active.request.ref} is not admitted any more")

    async def send_heartbeats(self) -> None:
        """Send a heartbeat every second for each request in progress, until cancelled."""
        while True:
            await asyncio.sleep(HEARTBEAT_S)
            for key, active in list(self._active.items()):
                if self._active.get(key) is not active:
                    continue  # It was answered while earlier heartbeats were sent.
                stage = active.stage
                heartbeat = self._reply(active.request, ReplyPhase.HEARTBEAT, stage.running_s, str(stage))
                await self._send_to_all(active, heartbeat)

    def close(self) -> None:
        """Refuse new requests from now on."""
        self.closed = True

    async def drain(self, bound_s: float) -> None:
        """Refuse new requests, and wait for those in progress.

        bound_s: seconds after which the remaining requests are cancelled. They are answered with a retryable failure, so that sandboxes send
        them to another replica.
        """
        self.close()
        if not await wait_for(self._idle, bound_s):
            await self._cancel_all()

    def _known_answer(self, request: GenerateRequest, key: RequestKey, now: float) -> bytes | None:
        job = self._jobs.find(request.ref)  # It is not created, because the request is not checked yet.
        found = None if job is None else job.answers.get(key)
        return found[1] if found is not None and now - found[0] < REMEMBERED_S else None

    def _start(self, active: _ActiveRequest) -> None:
        self._active[active.key] = active
        self._characters[active.request.ref.key] += _size(active.request)
        self._idle.clear()
        name = f"turn {request_id(active.request.episode, active.request.turn)}"
        work = self._run(active)
        try:
            active.task = task = self._tasks.create_task(work, name=name)
        except RuntimeError:  # the role is being stopped
            work.close()
            raise
        self._running.add(task)
        task.add_done_callback(lambda _: self._on_done(active, task))

    def _active_of(self, episode: CancelRequest | KeepRequest) -> list[_ActiveRequest]:
        names = (episode.namespace, episode.job, episode.agent, episode.episode)
        return [active for key, active in self._active.items() if key[:4] == names]

    def _join(self, active: _ActiveRequest, inbox: str, deadline_s: float) -> None:
        active.inboxes.pop(inbox, None)
        active.inboxes[inbox] = None
        while len(active.inboxes) > MAX_INBOXES:
            del active.inboxes[next(iter(active.inboxes))]
        _extend_deadline(active, deadline_s)

    async def _run(self, active: _ActiveRequest) -> None:
        answer = await self._answer(active)
        self._remove(active)  # Before the answer is sent: a duplicate that joined later would get no answer.
        encoded = wire.encode(answer)
        if answer.phase is ReplyPhase.RESULT:
            self._remember(active, encoded)
        await self._send_to_all(active, encoded)

    def _abort(self, active: _ActiveRequest) -> None:
        self._remove(active)  # At once: it ends later, without an answer, and its timeout cannot be extended any more.
        active.task.cancel()

    def _remove(self, active: _ActiveRequest) -> None:
        if self._active.get(active.key) is active:
            del self._active[active.key]

    def _on_done(self, active: _ActiveRequest, task: asyncio.Task[None]) -> None:
        self._remove(active)
        self._running.discard(task)
        self._characters[active.request.ref.key] -= _size(active.request)
        self._characters += Counter()  # Removes jobs without requests in progress.
        if not self._running:
            self._idle.set()

    async def _answer(self, active: _ActiveRequest) -> GenerateReply:
        """Play the turn and return its result or failure. Only a cancellation is raised."""
        request = active.request
        try:
            async with asyncio.timeout_at(active.until) as active.timeout:
                return self._result(request, await self._play(request, active.stage))
        except TimeoutError:
            text = f"the deadline of turn {request_id(request.episode, request.turn)} passed while {active.stage}"
            return self._failed(request, text, retryable=True, waits=True)
        except MarlaasError as error:
            waits = isinstance(error, _WAITS)
            failed = self._failed(request, str(error), retryable=waits or not isinstance(error, Permanent), waits=waits)
            causes = {
                "stops_engine": isinstance(error, EngineKilled) and error.is_sure,
                "is_refused": isinstance(error, BadAppend),
                "is_permanent": isinstance(error, NoChatTemplate | OtherVocabulary),
            }
            return failed.model_copy(update=causes)
        except Exception as error:
            _log.exception("turn %d of episode %s failed", request.turn, request.episode)
            return self._failed(request, f"replica {self._replica}: {error!r}", retryable=True)

    def _remember(self, active: _ActiveRequest, answer: bytes) -> None:
        now = _clock()
        self._jobs.of(active.request.ref).answers.put(active.key, (now, answer), _ANSWER_OBJECT_BYTES + len(answer))
        self._jobs.bounds.answers.trim(lambda found: found[0] <= now - REMEMBERED_S)

    async def _cancel_all(self) -> None:
        remaining = list(self._active.values())
        _log.warning("%d requests did not end in time; sandboxes send them to other replicas", len(remaining))
        for active in remaining:
            await self._stop(active, f"replica {self._replica} is stopping while {active.stage}")
        await self._idle.wait()

    async def _stop(self, active: _ActiveRequest, why: str) -> None:
        """Cancel a request, and answer that it may be sent again. why: the error text."""
        self._abort(active)
        await self._send_to_all(active, self._retry_elsewhere(active.request, why))

    def _result(self, request: GenerateRequest, turn: Turn) -> GenerateReply:
        return GenerateReply(
            request=request_id(request.episode, request.turn),
            phase=ReplyPhase.RESULT,
            replica=self._replica,
            text=turn.text,
            parts=turn.parts,
            opening=turn.opening,
            stop_reason=turn.stop_reason,
            num_tokens=len(unpack_ids(turn.output_ids)),
            num_prompt_tokens=turn.meter.prompt_tokens or turn.unfit_tokens,
            context_tokens=turn.context_tokens,
            is_overtime=turn.is_overtime,
        )

    def _failed(self, request: GenerateRequest, error: str, *, retryable: bool, waits: bool = False) -> GenerateReply:
        name = request_id(request.episode, request.turn)
        failed = GenerateReply(request=name, phase=ReplyPhase.FAILED, replica=self._replica, error=error)
        return failed.model_copy(update={"retryable": retryable, "waits": waits})

    def _retry_elsewhere(self, request: GenerateRequest, why: str) -> bytes:
        return wire.encode(self._failed(request, why, retryable=True, waits=True))

    def _reply(
        self, request: GenerateRequest, phase: ReplyPhase, running_s: float | None = None, doing: str = ""
    ) -> bytes:
        name = request_id(request.episode, request.turn)
        reply = GenerateReply(request=name, phase=phase, replica=self._replica, running_s=running_s, doing=doing)
        return wire.encode(reply)

    async def _send_to_all(self, active: _ActiveRequest, reply: bytes) -> None:
        for inbox in list(active.inboxes):
            await self._send(inbox, reply)

    async def _send(self, inbox: str, reply: bytes) -> None:
        """Send a reply once; if it is lost, the sandbox sends its request again."""
        try:
            await self._bus.send(inbox, reply)
        except MarlaasError as error:
            _log.warning("cannot send a reply on %s: %s", inbox, error)


def _extend_deadline(active: _ActiveRequest, deadline_s: float) -> None:
    """Extend a request's deadline to `deadline_s` seconds from now, unless it is later already.

    A deadline that has passed is not extended: the request fails, and its sandbox sends it again.
    """
    active.until = max(active.until, _clock() + min(deadline_s, MAX_DEADLINE_S))
    if active.timeout is not None and not active.timeout.expired():
        active.timeout.reschedule(active.until)


def _size(request: GenerateRequest) -> int:
    """Return the approximate memory of a request, in characters."""
    given = () if request.demonstration is None else (request.demonstration,)
    return _REQUEST_CHARACTERS + num_characters(request.append, request.tools) + num_characters(given, None)


def _key_of(request: GenerateRequest) -> RequestKey:
    names = request.namespace, request.job, request.agent, request.episode
    return (*names, request.turn, hash(_content_of(request)))


def _content_of(request: GenerateRequest) -> tuple[object, ...]:
    return request.parent, request.append, request.tools, request.stop, request.demonstration, request.scores


def _clock() -> float:
    return asyncio.get_running_loop().time()
