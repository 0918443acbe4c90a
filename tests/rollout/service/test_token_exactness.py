"""Token in, token out, through the whole of it: 500 random episodes, from the requests of a sandbox to the segments of a trainer.

What is compared was written down by neither side: what the engine was fed and what it drew. Now and then the replica forgets its
conversations, as after a failover, and restores them from their records.
"""

import asyncio
import json
import random
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
import pytest
from tests.rollout.chats import bpe
from tests.rollout.service.harness import Job
from tests.rollout.service.scripted import LIMITS, SELF_TEST, ScriptedEngine
from tests.tables import data, rows

from marlaas.models import prepare
from marlaas_api.blobs_memory import MemoryBlobs
from marlaas_api.messages import ChatMessage, GroupReady, StopReason, ToolCallMessage, TrajectoryRef
from marlaas_worker.rollout.engine import Completion
from marlaas_worker.rollout.templates import rewritten
from marlaas_worker.rollout.tokenizer import PretrainedTokenizer
from marlaas_worker.sandbox.ledger import TurnLedger, TurnMessage
from marlaas_worker.sandbox.turns import TurnClient, TurnTimeouts
from marlaas_worker.trainer.trajectories import Expectation, read_group
from marlaas_worker.trainer.weighing import segments_of

MEMBERS = 2
FORGETFUL = "forgetful"
MAX_TURNS = 6
WORDS = rows(__file__, "words")
TOOL = json.dumps({"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}})


class Drawn(NamedTuple):
    prompt: list[int]
    output: list[int]
    logprobs: list[float]


@dataclass
class DrawingEngine(ScriptedEngine):
    """Draws words, or any ids at all, and keeps what it was fed and what it drew, by episode."""

    tokenizer: PretrainedTokenizer | None = None
    vocabulary: int = 0
    drawn: dict[str, list[Drawn]] = field(default_factory=lambda: defaultdict(list))
    forget: Callable[[], None] = lambda: None

    async def generate(self, request, adapter, prompt_ids, sampling, began=None):
        if adapter.name.startswith(SELF_TEST):
            return await super().generate(request, adapter, prompt_ids, sampling)
        rng = random.Random(sampling.seed)
        if rng.random() < 0.3:
            self.forget()
        room = min(sampling.max_tokens, self.limits.max_model_len - len(prompt_ids))
        ids = [one for _ in range(rng.randint(0, 5)) for one in self._some(rng)]
        if rng.random() < 0.7:
            ids.append(rng.choice(sorted(self.tokenizer.end_ids)))
        ends = bool(ids) and ids[-1] in self.tokenizer.end_ids and len(ids) <= room
        ids = ids[:room] or self._some(rng)[:1]
        stop = StopReason.STOP if ends else StopReason.LENGTH if room == sampling.max_tokens else StopReason.CONTEXT
        logprobs = [-rng.random() for _ in ids]
        self.drawn[request.partition(".")[0]].append(Drawn(prompt_ids.tolist(), ids, logprobs))
        return Completion(tuple(ids), tuple(logprobs), stop)

    def _some(self, rng):
        """A word as text would be tokenised, or ids as no tokenizer would choose them; no end token within."""
        word = self.tokenizer.encode(rng.choice(WORDS)) if rng.random() < 0.7 else [rng.randrange(self.vocabulary)]
        return [one for one in word if one not in self.tokenizer.end_ids] or [self.vocabulary - 1]


@dataclass
class Play:
    client: TurnClient
    job: Job
    group: int
    member: int
    tools: bool
    ledger: TurnLedger = field(default_factory=lambda: TurnLedger(("policy",), MAX_TURNS))
    raw: set[int] = field(default_factory=set)

    async def run(self):
        rng = random.Random(f"{self.group}/{self.member}")
        for number in range(rng.randint(1, MAX_TURNS)):
            await self._turn(rng, number)
        episode = self.job.request(self.group, self.member).episode
        return TrajectoryRef(member=self.member, episode=episode, leaves=self.ledger.leaves()["policy"], reward=0.0)

    async def _turn(self, rng, number):
        parent = rng.choice([None, *range(number), number - 1, number - 1]) if number else None
        raw = parent in self.raw or rng.random() < 0.15
        if raw and (parent is None or parent in self.raw):
            self.raw.add(number)  # began as raw text: it cannot go on as chat
        append = _text(rng) if raw else tuple(_message(rng) for _ in range(rng.randint(1, 3)))
        # A reply that was begun cannot continue calls, or reasoning that the template drops.
        if not raw and append[-1].role == "assistant":
            begun = {"tool_calls": (), "content": append[-1].content.replace("</think>", "")}
            append = (*append[:-1], append[-1].model_copy(update=begun))
        tools = (TOOL,) * rng.randint(0, 1) if self.tools and not raw and rng.random() < 0.5 else None
        changes = {"parent": parent, "append": append, "tools": tools, "max_tokens": rng.choice([None, 1, 4, 30])}
        numbers = {"number": number, "num_before": number, "parent": parent}
        asked = TurnMessage(kind="turn", agent="policy", append="x", max_tokens=None, **numbers)
        assert self.ledger.begin(asked)
        reply = await self.client.generate(self.job.request(self.group, self.member, number, **changes), 60.0)
        self.ledger.end(asked, reply.stop_reason)


def _text(rng):
    return "".join(rng.choice(WORDS) for _ in range(rng.randint(1, 6)))


def _message(rng):
    role = rng.choice(("user", "tool", "system", "assistant"))
    calls = (ToolCallMessage(name="add", arguments='{"a": 1}'),) * (role == "assistant" and rng.random() < 0.3)
    return ChatMessage(role=role, content=_text(rng), tool_calls=calls)


def assert_trained_as_drawn(drawn, trained):
    """Every generated token is trained once, after exactly the ids that the engine was fed, and nothing else is."""
    for one in drawn:
        whole, begin, end = [*one.prompt, *one.output], len(one.prompt), len(one.prompt) + len(one.output)
        places = [
            segment
            for segment in trained
            if segment.ids[:end].tolist() == whole
            and segment.generated[begin:end].all()
            and np.array_equal(segment.behaviour[begin:end], np.asarray(one.logprobs, np.float32))
        ]
        assert len(places) == 1
    assert sum(int(segment.generated.sum()) for segment in trained) == sum(len(one.output) for one in drawn)


@pytest.mark.parametrize(("name", "num_episodes"), [("tiny", 200), ("smollm2-135m-instruct", 100), (FORGETFUL, 200)])
async def test_what_was_generated_is_what_is_trained_token_for_token(harness, roles, name, num_episodes):
    forgets = name == FORGETFUL
    folder = "" if forgets else str(await asyncio.to_thread(prepare, name))
    made = bpe(data(__file__, "thinks")) if forgets else PretrainedTokenizer.load(folder)
    vocabulary = len(made._tokenizer)

    def forget():
        for one in roles[0]._jobs:
            one.histories.clear()

    limits = replace(LIMITS, max_model_len=100)
    engine = DrawingEngine(limits=limits, tokenizer=made, vocabulary=vocabulary, forget=forget)
    await harness.replica(engine=engine, tokenizer=made)
    job = await harness.job(rollout={"maxTokens": 64})
    num_rewritten = full = 0
    async with TurnClient(harness.bus, TurnTimeouts(silence_s=0.5)) as client:
        for group in range(num_episodes // MEMBERS):
            plays = [Play(client, job, group, member, tools=forgets) for member in range(MEMBERS)]
            refs = await asyncio.gather(*(play.run() for play in plays))
            names = job.request(group).model_dump(include={"namespace", "job", "uid", "agent", "group"})
            numbers = {"step": 0, "base_version": 0, "position": 0, "index": group, "version": 0}
            ready = GroupReady(**names, **numbers, trajectories=tuple(refs))
            trained = await read_group(harness.bus, MemoryBlobs(), ready, Expectation(1.0, vocabulary, {}))
            for ref, read_back in zip(refs, trained, strict=True):
                turns = read_back.turns.values()
                assert_trained_as_drawn(engine.drawn[ref.episode], segments_of(read_back.turns, read_back.leaves, 1.0))
                num_rewritten += sum(turn.opens_segment and turn.parent is not None for turn in turns)
                full += sum(turn.stop_reason is StopReason.CONTEXT for turn in turns)
    assert full > 0
    assert (num_rewritten > 0) is bool(rewritten(made)) is forgets
