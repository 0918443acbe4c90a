"""One turn, from request to record: check, extend the prompt, pin the version, generate, record.

Everything that affects tokens, gradients or usage is read from the job's document, the pin and the turns
stream, never from the request. Replies, duplicates and deadlines are handled in `requests`.
"""

import asyncio
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from weakref import WeakValueDictionary

from marlaas_api.errors import Permanent
from marlaas_api.messages import GenerateRequest, Meter, StopReason, Turn
from marlaas_api.names import AdapterRef, derive_seed, group_token, request_id
from marlaas_api.wire import pack_ids, pack_logprobs
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
    """The engine exited each time that it ran this request. A retry would stop it for all tenants again."""


class _EngineReplaced(EngineDown):
    """The engine exited while the request waited outside it. The exit does not count against the request."""


@dataclass(slots=True)
class RequestStage:
    """A request's current stage, as text that completes "the time was over while …".

    Attributes:
        why: returns a more detailed reason; None if there is none.
        generating_since: on the loop's clock; None while the request waits.
    """

    doing: str = ""
    why: Callable[[], str] | None = None
    generating_since: float | None = None

    def enter(self, doing: str, why: Callable[[], str] | None = None) -> None:
        """Enter the next stage, in which the request waits."""
        self.doing, self.why, self.generating_since = doing, why, None

    def generate(self) -> None:
        """Note that the engine begins to generate."""
        self.doing, self.why, self.generating_since = "it was being generated", None, _clock()

    def __str__(self) -> str:
        return self.doing if self.why is None else f"{self.doing} ({self.why()})"


@dataclass(frozen=True, slots=True)
class GenerationDependencies:
    """The components that `Generation` uses."""

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
    """A completion with the version and sha256 of its adapter, and its queue and engine times in seconds."""

    completion: Completion
    version: int
    sha256: str
    queue_s: float = 0.0
    engine_s: float = 0.0


@dataclass(slots=True)
class Generation:
    """Plays turns, any number of them concurrently."""

    dependencies: GenerationDependencies
    _calls: "count[int]" = field(default_factory=count)
    _long_texts: WeakValueDictionary[str, asyncio.Lock] = field(default_factory=WeakValueDictionary)

    async def play(self, request: GenerateRequest, stage: RequestStage) -> Turn:
        """Return the turn's record, either generated now or recorded earlier.

        Waits until cancelled for the version, for an engine restart, and for the bus to accept the record.

        Raises:
            RequestRefused, VersionRefused, EngineKilled and other Permanent errors: a retry cannot help.
            NotAdmitted, PinMissing and other Retryable errors.
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
        """Return the turn if an earlier process or another replica has recorded it.

        The turns stream is not read if both the group's pin and the parent are in memory. A record missed that
        way costs one generation; it is still found, and returned, when the new turn is recorded.
        """
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
        """Tokenize the prompt. Long texts run in a thread, one at a time for each job.

        So a job that sends much text delays neither other jobs' turns nor other users of the thread pool.
        """
        parent = await self.dependencies.histories.parent(request)
        append = request.append
        if num_characters(request) < _LONG_CHARACTERS:
            return extend(self.dependencies.tokenizer, parent, append, request.tools)
        async with self._long_texts.setdefault(request.uid, asyncio.Lock()):
            return await asyncio.to_thread(extend, self.dependencies.tokenizer, parent, append, request.tools)

    async def _draw(self, order: "_Order", stage: RequestStage) -> _Drawn:
        """Generate, and retry after engine restarts. Raises EngineKilled after MAX_ENGINE_DEATHS exits with this request."""
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
        """Record the turn. A prompt beyond the context window was not fed to the engine, so its ids are not recorded."""
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
    """Inputs of one generation. began: when the request arrived, on the loop's clock."""

    request: GenerateRequest
    served: Served
    adapter: AdapterRef
    prompt: Prompt
    began: float


def check(request: GenerateRequest, served: Served) -> None:
    """Refuse inconsistent names and turn numbers that no episode can have; pins, seeds and records depend on them.

    Names become parts of subjects and keys, so their length is bounded too: the NATS server disconnects a
    client that sends a subject of 32 KiB, and that client would be this replica. Raises RequestRefused.
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
    """Return the recorded turn if it answers this request.

    Raises RequestRefused if agent, parent or content differ. After a crash of the bus a task may be played
    twice under the same names, and its environment may write other texts. An answer to the other play's text
    would be scored here and trained with the other prompt. After the refusal this play ends as a fault and is
    repeated under a new name.
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
