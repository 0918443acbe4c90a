"""One turn, from request to record: check the request, find the pinned version, extend the prompt, generate, record the turn.

Everything that affects tokens, gradients or usage is read from the job's document, the pin and the turns
stream, never from the request. Replies, duplicates and deadlines are handled in `requests`.

Prompts are tokenized, and replies parsed, with the tokenizer of the job's chat template (`Tokenizers`).
"""

import asyncio
from collections.abc import Callable, Collection, Iterable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import TypeVar
from weakref import WeakValueDictionary

from marlaas_api.errors import InvalidInput
from marlaas_api.messages import ChatMessage, GenerateRequest, JobAgent, JobDocument, StopReason, Turn
from marlaas_api.messages.job_spec import ChatTemplateSettings
from marlaas_api.names import AdapterRef, request_id, sampling_seed
from marlaas_worker.adapters import TENSORS_FILE
from marlaas_worker.role import RoleContext
from marlaas_worker.rollout.conversation import (
    BadAppend,
    NoChatTemplate,
    Prompt,
    conclude,
    extend,
    num_characters,
)
from marlaas_worker.rollout.demonstrated import demonstrated
from marlaas_worker.rollout.engine import Began, Completion, EngineDown, Sampling
from marlaas_worker.rollout.policies import Pins, Policies, past_caller, refreshes
from marlaas_worker.rollout.replies import EndingTokenizer, ReadReply, read, stops_of
from marlaas_worker.rollout.request_limiter import Place, account_of
from marlaas_worker.rollout.scoring import require_vocabulary, score_record, segments
from marlaas_worker.rollout.served_jobs import Failures, ServedJob, ServedJobs
from marlaas_worker.rollout.slots import Slot
from marlaas_worker.rollout.supervised_engine import MAX_ENGINE_FAILURES, Computed, SupervisedEngine
from marlaas_worker.rollout.turn_log import (
    Drawn,
    Order,
    TurnLog,
    add_history,
    demonstrated_record,
    knows_parent,
    require_same,
    turn_record,
)
from marlaas_worker.rollout.versions import Versions

_LONG_CHARACTERS = 16_384
_LONG_REPLY = 2048
"""Longer texts, in characters, are tokenized in a thread; longer replies, in tokens, are parsed in one."""
_OUT_OF_CONTEXT = Completion((), (), StopReason.CONTEXT)
_POOLS_TEMPLATE = ChatTemplateSettings()
"""Settings of a job that chooses no chat template and sets no variables: its tokenizer is the pool's."""
T = TypeVar("T")


@dataclass(slots=True)
class RequestStage:
    """A request's current stage.

    Attributes:
        doing: the stage as text that completes "the deadline passed while …".
        why: returns the reason why the request still waits; None if there is none.
        generating_since: when the engine began to generate, on the loop's clock; None while the request waits.
    """

    doing: str = ""
    why: Callable[[], str] | None = None
    generating_since: float | None = None

    def enter(self, doing: str, why: Callable[[], str] | None = None) -> None:
        """Enter the next stage, in which the request waits."""
        self.doing, self.why, self.generating_since = doing, why, None

    def generate(self) -> None:
        """Enter the stage in which the engine generates."""
        self.doing, self.why, self.generating_since = "it was being generated", None, _clock()

    @property
    def running_s(self) -> float | None:
        """Seconds since the engine began to generate; None while the request waits."""
        return None if self.generating_since is None else _clock() - self.generating_since

    def __str__(self) -> str:
        return self.doing if self.why is None else f"{self.doing} ({self.why()})"


class Tokenizers:
    """Tokenizers by chat template. All have the same vocabulary. A tokenizer is dropped when no job uses its template.

    pool: the tokenizer with the pool's template.
    """

    def __init__(self, pool: EndingTokenizer) -> None:
        self.pool = pool
        self._made: dict[ChatTemplateSettings, EndingTokenizer] = {}

    def __len__(self) -> int:
        return 1 + len(self._made)

    async def of(self, document: JobDocument) -> EndingTokenizer:
        """Return the tokenizer with a job's chat template; make it if there is none. Raises NoChatTemplate if the template is missing or refused."""
        settings = document.spec.rollout.chat_template
        if settings == _POOLS_TEMPLATE:
            return self.pool
        if (known := self._made.get(settings)) is not None:
            return known
        try:
            made = await asyncio.to_thread(self.pool.for_job, settings)
        except InvalidInput as error:
            raise NoChatTemplate(f"chatTemplate: {error}") from error
        return self._made.setdefault(settings, made)

    async def vocabulary(self) -> str:
        """Return the digest of the vocabulary that all these tokenizers share (`EndingTokenizer.vocabulary`)."""
        return await asyncio.to_thread(lambda: self.pool.vocabulary)

    def further_ends(self, tokenizer: EndingTokenizer) -> frozenset[int]:
        """Return the end tokens of a job's tokenizer that the pool's lacks. Requests must name them: the engine does not know them."""
        return tokenizer.end_ids - self.pool.end_ids

    def keep(self, documents: Iterable[JobDocument]) -> None:
        """Drop the tokenizers that none of these jobs uses."""
        used: Collection[ChatTemplateSettings] = {one.spec.rollout.chat_template for one in documents}
        self._made = {settings: one for settings, one in self._made.items() if settings in used}


@dataclass(slots=True, kw_only=True)
class Generation:
    """Plays turns, any number of them concurrently: each is generated, scored, or given as a demonstration, and then recorded.

    Attributes:
        context: the role's name, clock and connections.
        tokenizers: the tokenizer of each job's chat template.
        engine: generates and scores; counts its failures by prompt.
        policies: finds a request's job and agent.
        pins: the policy version that each group is pinned to.
        versions: the adapter versions in the engine's slots.
        jobs: state of the jobs on this replica, with their caches.
        log: reads and writes recorded turns.
    """

    context: RoleContext
    tokenizers: Tokenizers
    engine: SupervisedEngine
    policies: Policies
    pins: Pins
    versions: Versions
    jobs: ServedJobs
    log: TurnLog
    _calls: "count[int]" = field(default_factory=count)
    _retried: asyncio.Lock = field(default_factory=asyncio.Lock)
    _long_texts: WeakValueDictionary[str, asyncio.Lock] = field(default_factory=WeakValueDictionary)

    async def play(self, request: GenerateRequest, stage: RequestStage) -> Turn:
        """Return the turn's record, either generated now or recorded earlier.

        Waits until cancelled for the version, for an engine restart, and for the bus to accept the record.

        Raises:
            RequestRefused, VersionRefused, EngineKilled and other Permanent errors: a retry cannot help.
            NotAdmitted, PinMissing and other Retryable errors: a later try may succeed.
        """
        began = _clock()
        served = await self.policies.find(request)
        with self.engine.limiter.episodes.request(account_of(served.document, request.agent), request.episode):
            return await self._play(request, served, stage, began)

    async def _play(self, request: GenerateRequest, served: JobAgent, stage: RequestStage, began: float) -> Turn:
        job = self.jobs.of(served.ref)
        if not (self.pins.knows(job, request, served.document) and knows_parent(job, request)):
            # If both are in memory, the stream is not read. A record missed that way costs one generation; it is
            # still found, and returned, when the new turn is recorded.
            recorded = await self.log.find(request.namespace, request.job, request.episode, request.turn)
            if recorded is not None:
                return require_same(recorded, request)
        if request.demonstration is not None:
            return await self._play_demonstrated(request, request.demonstration, served, job, stage)
        stage.enter(f"no version of agent {request.agent} was verified yet")
        document, num_preemptions = served.document, self.policies.num_preemptions(request.ref)
        adapter = await self._version(job, request, served)
        if request.scores is not None:
            return await self._play_score(request, served, job, adapter, stage)
        if (caller := past_caller(request, document)) is not None:
            self.jobs.agent(served.agent_ref).call(adapter.version, *caller, _clock())
        tokenizer = await self.tokenizers.of(document)
        prompt = await self._extend(job, request, tokenizer)
        vocabulary = "" if document.spec.teacher is None else await self.tokenizers.vocabulary()
        order = Order(request, served, job, tokenizer, adapter, prompt, began, num_preemptions, vocabulary)
        drawn = await self._draw(order, stage)
        reply = await self._read(tokenizer, prompt, drawn.completion)
        turn = turn_record(order, drawn, reply, self.context.name, self.context.now())
        return require_same(await self._record(job, turn, prompt, drawn.completion, stage), request)

    async def _play_score(
        self, request: GenerateRequest, served: JobAgent, job: ServedJob, adapter: AdapterRef, stage: RequestStage
    ) -> Turn:
        """Record the logprobs of another agent's tokens under the request's agent, the teacher.

        The engine scores each segment of the conversation as one prompt; segments without generated tokens are left out.
        """
        stage.enter("the turns that it scores were being read")
        lineage, own = await self.log.scored(request), await self.tokenizers.vocabulary()
        require_vocabulary(lineage, own, request.agent)
        window, num_preemptions = self.engine.limits.max_model_len, self.policies.num_preemptions(request.ref)
        found = []
        for segment in segments(lineage):
            if segment.generated.any():
                prompt = segment.prompt(window)
                order = Order(request, served, job, self.tokenizers.pool, adapter, prompt, _clock(), num_preemptions)
                found.append((segment, await self._draw(order, stage)))
        turn = score_record(request, adapter, found, self.context.name, self.context.now())
        turn = turn.model_copy(update={"num_preemptions": num_preemptions})
        stage.enter("it was being recorded", self.log.explain)
        return require_same(await self.log.record(job, turn), request)

    async def _play_demonstrated(
        self, request: GenerateRequest, given: ChatMessage, served: JobAgent, job: ServedJob, stage: RequestStage
    ) -> Turn:
        """Record the reply that the request contains (`given`). Uses neither the group's pin nor the engine.

        Raises BadAppend, also if prompt and reply exceed the context window.
        """
        tokenizer = await self.tokenizers.of(served.document)
        parent = await self.log.parent(job, request, tokenizer)
        tokenize = partial(demonstrated, tokenizer, parent, request.append, request.tools, given)
        length = num_characters(request.append, request.tools) + num_characters((given,), None)
        found = await self._tokenized(request, length, tokenize)
        room, num_ids = self.engine.limits.max_model_len, len(found.completion.output_ids)
        if found.prompt.room(room) < num_ids:
            text = f"its demonstrated reply has {num_ids} tokens after a prompt of {len(found.prompt.ids)}, and the base model's context has {room}"
            raise BadAppend(text)
        reply = await self._read(tokenizer, found.prompt, found.completion)
        turn = demonstrated_record(request, found, reply, self.context.name, self.context.now())
        return require_same(await self._record(job, turn, found.prompt, found.completion, stage), request)

    async def _record(
        self, job: ServedJob, turn: Turn, prompt: Prompt, completion: Completion, stage: RequestStage
    ) -> Turn:
        """Record a turn, and cache its conversation; if the turn is recorded already, return that record instead, and cache nothing."""
        stage.enter("it was being recorded", self.log.explain)
        recorded = await self.log.record(job, turn)
        if recorded is turn:
            add_history(job, turn, conclude(prompt, turn.text, completion.output_ids, turn.stop_reason))
        return recorded

    async def _version(self, job: ServedJob, request: GenerateRequest, served: JobAgent) -> AdapterRef:
        """Return the version that samples a turn: that of its group's pin, or a newer one that is served here, if the turn `refreshes`."""
        document, proven = served.document, self.versions.proven
        newest = partial(proven.newest_of, served.agent_ref, document.tenant, document.spec.training.max_staleness)
        pinned = await self.pins.version(job, request, document, newest)
        if not refreshes(request, document):
            return served.adapter(pinned)
        return served.adapter(max(pinned, proven.newest_resident(served.agent_ref)))

    async def _extend(self, job: ServedJob, request: GenerateRequest, tokenizer: EndingTokenizer) -> Prompt:
        """Return the tokenized prompt of a request: its parent's conversation and its append. Raises as `TurnLog.parent`, and BadAppend."""
        parent = await self.log.parent(job, request, tokenizer)
        tokenize = partial(extend, tokenizer, parent, request.append, request.tools)
        return await self._tokenized(request, num_characters(request.append, request.tools), tokenize)

    async def _tokenized(self, request: GenerateRequest, length: int, tokenize: Callable[[], T]) -> T:
        """Call `tokenize` and return its result. Long texts are tokenized in a thread, one at a time for each job.

        So a job that sends much text delays neither other jobs' turns nor other users of the thread pool.

        request: its uid names the job. length: of the text, in characters.
        """
        if length < _LONG_CHARACTERS:
            return tokenize()
        async with self._long_texts.setdefault(request.uid, asyncio.Lock()):
            return await asyncio.to_thread(tokenize)

    async def _read(self, tokenizer: EndingTokenizer, prompt: Prompt, completion: Completion) -> ReadReply:
        """Parse the reply; a long one in a thread, because a text full of markers takes a second."""
        parse = partial(read, tokenizer, prompt, completion.output_ids, completion.stop_reason)
        return await asyncio.to_thread(parse) if len(completion.output_ids) > _LONG_REPLY else parse()

    async def _draw(self, order: Order, stage: RequestStage) -> Drawn:
        """Generate a turn or score its prompt (`order`), and retry after engine restarts.

        Requests that were in the engine when it failed are retried one at a time, beside new requests. So a prompt that ends the engine
        never interrupts the same other request twice. After the second failure with a prompt, it runs alone in the engine.

        Raises EngineKilled after MAX_ENGINE_FAILURES failures with this prompt.
        """
        prompt, own = (order.job, order.prompt.ids), Failures()
        while (known := self.engine.failures.of(*prompt, own)).number < MAX_ENGINE_FAILURES:
            try:
                drawn = await self._run(order, stage, known, own)
            except EngineDown as error:
                own = self.engine.failures.note(*prompt, known, own, str(error))
            else:
                if drawn is not None:
                    return drawn
        raise self.engine.failures.verdict(*prompt, known, request_id(order.request.episode, order.request.turn))

    async def _run(self, order: Order, stage: RequestStage, known: Failures, own: Failures) -> Drawn | None:
        """Generate or score once; return None if the caller must call again with the current number of failures.

        The request waits until its version has a slot, then for a place in the engine. If the version has lost its slot by then, it
        waits again.

        Args:
            stage: updated as the request proceeds.
            known: failures with the prompt when the caller began this try. After one failure, the request runs as the only retry of this
                replica; after two, as the only request in the engine. If their number has changed while it waited (another request
                with the prompt has failed or succeeded), the result is None.
            own: failures of this request alone; they count if they are more than the prompt's.

        Raises VersionRefused, and EngineDown, which the caller counts as a failure.
        """
        proven, adapter = self.versions.proven, order.adapter
        while True:
            async with AsyncExitStack() as stack:
                stage.enter(f"version {adapter.version} was not served", partial(self.versions.explain, adapter))
                async with proven.queue(adapter, order.served.document.tenant):
                    if known.number:  # Only now: the version of one request must not delay the retries of all others.
                        stage.enter("it waited to be tried again after a failure of the engine")
                        await stack.enter_async_context(self._retried)
                    stage.enter("it waited for a place in the engine")
                    place = await stack.enter_async_context(self._place(order, alone=known.number > 1))
                if self.engine.failures.of(order.job, order.prompt.ids, own).number != known.number:
                    return None
                slot = stack.enter_context(proven.hold(adapter))
                if slot is not None:
                    return await self._run_on(order, slot, place, stage)

    async def _run_on(self, order: Order, slot: Slot, place: Place, stage: RequestStage) -> Drawn:
        engine = self.engine
        assert slot.manifest is not None
        sha256 = slot.manifest.files[TENSORS_FILE].sha256
        if order.prompt.room(engine.limits.max_model_len) < 1:
            return Drawn(_OUT_OF_CONTEXT, sha256, context_tokens=engine.limits.max_model_len)
        stage.enter("it waited within the engine")
        entered = _clock()
        mark = engine.meter.enter(entered)
        computed, is_cut = Computed(), False
        try:
            if order.is_score:
                completion = await self._score(order, slot)
            else:
                completion = await self._generate(order, slot, partial(_begin, stage, place))
            self.engine.failures.generated(order.job, order.prompt.ids)
            computed = Computed(len(order.prompt.ids) - completion.cached_tokens, len(completion.output_ids))
        except BaseException as error:
            if stage.running_s is not None or isinstance(error, asyncio.CancelledError):
                num_prompt, most = len(order.prompt.appended), order.max_tokens(engine.limits)
                computed = engine.meter.unfinished(num_prompt, stage.running_s, most)
            is_preempted = self.policies.num_preemptions(order.request.ref) > order.num_preemptions
            is_cut = is_preempted and isinstance(error, asyncio.CancelledError)
            raise  # Without a first token it was refused, or the engine was down.
        finally:
            share_s = engine.meter.leave(mark, _clock())
            place.cost = computed.cost
            engine.meter.charge(order.job, computed, share_s, order.served, _clock())
            if is_cut:
                order.job.preempted.add(computed.num_generated, share_s)
        if not order.is_score:
            order.job.outputs.note(computed.num_generated)
        engine.meter.decode.note(stage.running_s or 0.0, computed.num_generated)
        return Drawn(completion, sha256, entered - order.began, _clock() - entered, share_s)

    def _place(self, order: Order, alone: bool) -> AbstractAsyncContextManager[Place]:
        if order.prompt.room(self.engine.limits.max_model_len) < 1:
            return nullcontext(Place())  # The engine does not get the request.
        limiter, account = self.engine.limiter, order.account
        if alone:
            return limiter.alone(account)
        expected = order.job.outputs.expected_tokens(order.max_tokens(self.engine.limits))
        num_appended = len(order.prompt.appended)
        kv_tokens = len(order.prompt.past) + num_appended + expected
        return limiter.place(account, num_appended, expected, kv_tokens)

    async def _score(self, order: Order, slot: Slot) -> Completion:
        """Return the logprobs of all ids of the prompt but the first. They are the logprobs of a completion without output ids."""
        logprobs = await self.engine.score(slot.loaded, order.prompt.ids)
        return Completion((), tuple(logprobs.tolist()), StopReason.STOP)

    async def _generate(self, order: Order, slot: Slot, began: Began) -> Completion:
        request, document = order.request, order.served.document
        rollout = document.spec.sampling(request.group)
        stops, end_ids = stops_of(order.tokenizer, rollout, request)
        sampling = Sampling(
            temperature=rollout.temperature,
            max_tokens=min(request.max_tokens or rollout.max_tokens, rollout.max_tokens),
            stops=stops,
            end_ids=end_ids | self.tokenizers.further_ends(order.tokenizer),
            seed=sampling_seed(document.seed, len(document.spec.agents), request.group, request.member, request.turn),
            max_s=document.spec.turn_timeout_s,
        )
        call = f"{request_id(request.episode, request.turn)}/{next(self._calls)}"
        return await self.engine.generate(call, slot.loaded, order.prompt.ids, sampling, began)


def _begin(stage: RequestStage, place: Place) -> None:
    stage.generate()
    place.begin()


def _clock() -> float:
    return asyncio.get_running_loop().time()
