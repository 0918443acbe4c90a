"""One turn, from the request to its record: who asks, what is appended, which version answers, what is written down.

Whatever decides about a token, a gradient or a bill comes from the job's document, the pin and the turns stream, never from the request.
Knows nothing of replies, duplicates and deadlines (`requests`).
"""

import asyncio
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from weakref import WeakValueDictionary

from marlaas_api.arrays import pack_ids, pack_logprobs
from marlaas_api.errors import Permanent
from marlaas_api.messages import GenerateRequest, Meter, StopReason, Turn
from marlaas_api.names import AdapterRef, derive_seed, group_token, request_id
from marlaas_worker.adapters import TENSORS_FILE
from marlaas_worker.role import RoleContext
from marlaas_worker.rollout.conversation import Prompt, Tokenizer, conclude, extend, read_reply
from marlaas_worker.rollout.engine import Completion, EngineDown, Sampling
from marlaas_worker.rollout.histories import Histories, key_of
from marlaas_worker.rollout.metering import EngineMeter
from marlaas_worker.rollout.pins import Pins
from marlaas_worker.rollout.policies import Policies, RequestRefused, Served
from marlaas_worker.rollout.record import TurnLog
from marlaas_worker.rollout.request_limiter import RequestLimiter
from marlaas_worker.rollout.supervision import SupervisedEngine
from marlaas_worker.rollout.text_limits import beginning, is_shown, num_characters
from marlaas_worker.rollout.versions import Held, Versions

MAX_ENGINE_DEATHS = 3
_WORDS = 200
_LONG_CHARACTERS = 16_384
_COPIED = {"namespace", "job", "uid", "agent", "group", "member", "episode", "turn", "parent"}
_OUT_OF_CONTEXT = Completion((), (), StopReason.CONTEXT)


class EngineKilled(Permanent):
    """The engine died each time that it had this request. Asking again would kill it for all tenants."""


class _EngineReplaced(EngineDown):
    """The engine died while a request waited outside it: the request has no part in that."""


@dataclass(slots=True)
class RequestStage:
    """What a request is doing, in words that finish "its time was over while …"; `why` may know more.

    generating_since: on the loop's clock; None while the request waits.
    """

    doing: str = ""
    why: Callable[[], str] | None = None
    generating_since: float | None = None

    def enter(self, doing: str, why: Callable[[], str] | None = None) -> None:
        """Go on to the next stage, in which the request waits."""
        self.doing, self.why, self.generating_since = doing, why, None

    def generate(self) -> None:
        """The engine begins to generate."""
        self.doing, self.why, self.generating_since = "it was being generated", None, _clock()

    def __str__(self) -> str:
        return self.doing if self.why is None else f"{self.doing} ({self.why()})"


@dataclass(frozen=True, slots=True)
class GenerationDependencies:
    """What a generation reads and writes."""

    context: RoleContext
    tokenizer: Tokenizer
    engine: SupervisedEngine
    policies: Policies
    versions: Versions
    pins: Pins
    log: TurnLog
    histories: Histories
    limiter: RequestLimiter
    meter: EngineMeter


@dataclass(frozen=True, slots=True)
class _Drawn:
    """A completion, by whom, and how long it waited and ran, in seconds."""

    completion: Completion
    version: int
    sha256: str
    queue_s: float = 0.0
    engine_s: float = 0.0


@dataclass(slots=True)
class Generation:
    """Plays turns; any number at once."""

    dependencies: GenerationDependencies
    _calls: "count[int]" = field(default_factory=count)
    _long_texts: WeakValueDictionary[str, asyncio.Lock] = field(default_factory=WeakValueDictionary)

    async def play(self, request: GenerateRequest, stage: RequestStage) -> Turn:
        """Return the turn's record, made now or earlier.

        Raises RequestRefused, VersionRefused, EngineKilled and other Permanent errors (asking again is no use), NotAdmitted, PinMissing and other
        Retryable ones. Waits for its version, for an engine that restarts, and for the bus to take the record, until cancelled.
        """
        dependencies, began = self.dependencies, _clock()
        served = await dependencies.policies.find(request.ref, request.agent)
        check(request, served)
        if (recorded := await self._recorded(request)) is not None:
            return _as_asked(recorded, request)
        version = await self._pinned(request, served, stage)
        prompt = await self._extended(request)
        num_ids = len(prompt.past) + len(prompt.appended)
        if not is_shown(request, num_ids):
            text = f"{num_characters(request)} characters and only {num_ids} tokens: the model's chat template shows little of them"
            raise RequestRefused(text)
        drawn = await self._draw(_Order(request, served, served.adapter(version), prompt, began), stage)
        stage.enter("it was being recorded", dependencies.log.explain)
        return await self._record(request, served, prompt, drawn)

    async def _recorded(self, request: GenerateRequest) -> Turn | None:
        """The turn as played before this process, or another replica's. Where group and parent are in memory nobody asks: a record
        that is missed costs a generation, and counts nevertheless once the new one is to be recorded."""
        dependencies = self.dependencies
        if dependencies.pins.knows(request) and dependencies.histories.knows_parent(request):
            return None
        return await dependencies.log.find(request.namespace, request.job, request.episode, request.turn)

    async def _pinned(self, request: GenerateRequest, served: Served, stage: RequestStage) -> int:
        async def newest() -> int:
            return await self.dependencies.versions.newest_verified(served.adapter(0))

        stage.enter(f"no version of agent {request.agent} was verified yet")
        return await self.dependencies.pins.version(request, served.document, newest)

    async def _extended(self, request: GenerateRequest) -> Prompt:
        """Tokenise, beside the loop if it takes long, and one long text of a job at a time: nobody else's turn, and nothing else that needs a
        thread, waits for a flood of text."""
        parent = await self.dependencies.histories.parent(request)
        append = request.append
        if num_characters(request) < _LONG_CHARACTERS:
            return extend(self.dependencies.tokenizer, parent, append, request.tools)
        async with self._long_texts.setdefault(request.uid, asyncio.Lock()):
            return await asyncio.to_thread(extend, self.dependencies.tokenizer, parent, append, request.tools)

    async def _draw(self, order: "_Order", stage: RequestStage) -> _Drawn:
        """Generate, again if the engine dies; a request under which it dies every time is not tried for ever."""
        versions, adapter, request = self.dependencies.versions, order.adapter, order.request
        deaths = 0
        while True:
            stage.enter(f"version {adapter.version} was not served", lambda: versions.explain(adapter))
            try:
                async with versions.hold(adapter) as held:
                    return await self._run(order, held, stage)
            except _EngineReplaced:
                continue
            except EngineDown as error:
                deaths += 1
                if deaths == MAX_ENGINE_DEATHS:
                    turn = request_id(request.episode, request.turn)
                    raise EngineKilled(
                        f"the engine died {deaths} times with turn {turn} in it; last: {error}"
                    ) from error

    async def _run(self, order: "_Order", held: Held, stage: RequestStage) -> _Drawn:
        dependencies, uid = self.dependencies, order.request.uid
        sha256 = held.manifest.files[TENSORS_FILE].sha256
        if order.prompt.room(dependencies.engine.limits.max_model_len) < 1:
            return _Drawn(_OUT_OF_CONTEXT, order.adapter.version, sha256)
        stage.enter("it waited for a place in the engine")
        async with dependencies.limiter.place(uid):
            if held.incarnation != dependencies.engine.incarnation:
                raise _EngineReplaced("the engine died while this request waited for a place")
            stage.enter("it waited within the engine")
            entered = _clock()
            mark = dependencies.meter.enter(entered)
            try:
                completion = await self._generate(order, held, stage)
            finally:
                dependencies.meter.leave(mark, uid, _clock())
        dependencies.meter.job_tokens[uid] += len(completion.output_ids)
        return _Drawn(completion, order.adapter.version, sha256, entered - order.began, _clock() - entered)

    async def _generate(self, order: "_Order", held: Held, stage: RequestStage) -> Completion:
        request, document = order.request, order.served.document
        rollout = document.spec.rollout
        sampling = Sampling(
            temperature=rollout.temperature,
            max_tokens=min(request.max_tokens or rollout.max_tokens, rollout.max_tokens),
            seed=derive_seed(document.seed, group_token(request.group), request.member, request.turn),
        )
        call = f"{request_id(request.episode, request.turn)}/{next(self._calls)}"
        return await self.dependencies.engine.generate(call, held.loaded, order.prompt.ids, sampling, stage.generate)

    async def _record(self, request: GenerateRequest, served: Served, prompt: Prompt, drawn: _Drawn) -> Turn:
        """Write the turn down. Nothing is fed to the engine beyond the context window, so nothing of it is recorded either."""
        dependencies, completion = self.dependencies, drawn.completion
        fed = len(completion.output_ids) > 0 or completion.stop_reason is not StopReason.CONTEXT
        text = read_reply(dependencies.tokenizer, completion.output_ids, completion.stop_reason)
        append, tools = (request.append, request.tools) if fed else beginning(request)
        turn = Turn(
            **request.model_dump(include=_COPIED),
            append=append,
            tools=tools,
            version=drawn.version,
            adapter_sha256=drawn.sha256,
            opens_segment=prompt.draft.opens_segment if fed else request.parent is None,
            prompt_ids=pack_ids(prompt.appended) if fed else b"",
            output_ids=pack_ids(completion.output_ids),
            logprobs=pack_logprobs(completion.logprobs),
            text=text,
            stop_reason=completion.stop_reason,
            temperature=served.document.spec.rollout.temperature,
            meter=_meter(prompt, drawn, fed),
            replica=dependencies.context.name,
            at=dependencies.context.now(),
        )
        stored = await dependencies.log.record(turn)
        if stored is turn:
            conversation = conclude(prompt, text, completion.output_ids, completion.stop_reason)
            dependencies.histories.keep(key_of(turn, turn.turn), conversation)
        return _as_asked(stored, request)


@dataclass(frozen=True, slots=True)
class _Order:
    """What is to be generated. began: when the request came, on the loop's clock."""

    request: GenerateRequest
    served: Served
    adapter: AdapterRef
    prompt: Prompt
    began: float


def check(request: GenerateRequest, served: Served) -> None:
    """Refuse names that do not belong together, and turns that no episode has: they decide about pins, seeds and records.

    A name is part of subjects and keys as it is, so none may be longer than ours are: the server hangs up on who sends it a subject
    of 32 KiB, and this replica would be who sends it. Raises RequestRefused.
    """
    uid, group, spec = served.document.uid, request.group, served.document.spec
    try:
        token = group_token(group)
    except ValueError as error:
        raise RequestRefused(str(error)[:_WORDS]) from error
    if group != f"{uid}-{token}":
        raise RequestRefused(f"group {group[:_WORDS]!r} is not of job uid {uid}")
    if not 0 <= request.member < spec.rollout.group_size:
        raise RequestRefused(f"member {request.member} of a group of {spec.rollout.group_size}")
    if not re.fullmatch(re.escape(f"{group}-{request.member}-") + "[0-9]{1,9}", request.episode):
        raise RequestRefused(
            f"episode {request.episode[:_WORDS]!r} is not of member {request.member} of group {group!r}"
        )
    if not 0 <= request.turn < len(spec.agents) * spec.rollout.max_turns:
        raise RequestRefused(f"turn {request.turn} is none at maxTurns {spec.rollout.max_turns}")
    if request.parent is not None and not 0 <= request.parent < request.turn:
        raise RequestRefused(f"turn {request.turn} cannot follow turn {request.parent}")
    if request.max_tokens is not None and request.max_tokens < 1:
        raise RequestRefused(f"maxTokens is {request.max_tokens}; at least 1 is needed")


def _as_asked(turn: Turn, request: GenerateRequest) -> Turn:
    """The recorded turn, if it answers this very question.

    After a crash of the bus a task may be played a second time under the same names, and its environment may not say the same again. An
    answer to the other play's words would be scored here and trained with those. Refused, this play ends as a fault and gets a name of its own.
    """
    if turn.agent != request.agent:
        raise RequestRefused(f"turn {turn.turn} of episode {turn.episode} is agent {turn.agent}'s")
    asked = (request.append, request.tools)
    if turn.parent != request.parent or (turn.append, turn.tools) not in (asked, beginning(request)):
        raise RequestRefused(
            f"turn {turn.turn} of episode {turn.episode} is recorded as the answer to something else: another play has this name"
        )
    return turn


def _meter(prompt: Prompt, drawn: _Drawn, fed: bool) -> Meter:
    return Meter(
        prompt_tokens=len(prompt.past) + len(prompt.appended) if fed else 0,
        cached_tokens=drawn.completion.cached_tokens,
        output_tokens=len(drawn.completion.output_ids),
        queue_s=drawn.queue_s,
        engine_s=drawn.engine_s,
    )


def _clock() -> float:
    return asyncio.get_running_loop().time()
