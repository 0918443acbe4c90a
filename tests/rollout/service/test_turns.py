import asyncio
import contextlib
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from tests.rollout.service.scripted import CharacterTokenizer, gain
from tests.tables import data, rows

from marlaas.models.tokenizer import save_tokenizer
from marlaas_api.health import exposition
from marlaas_api.messages import ChatMessage, ReplyPhase, StopReason
from marlaas_api.names import SCORES
from marlaas_api.wire import encode, unpack_ids, unpack_logprobs
from marlaas_worker.adapters import TENSORS_FILE
from marlaas_worker.health import families
from marlaas_worker.rollout.templates import REWRITES_PAST
from marlaas_worker.rollout.tokenizer import PretrainedTokenizer


async def test_a_turn_is_recorded_then_answered_and_counted_by_a_replica_that_says_that_it_is_ready(harness):
    replica, job = await harness.serving()
    request = job.request(index=3, member=2)
    async with harness.asking(request) as asked:
        reply = await asked.end()
    assert asked.without_heartbeats == [ReplyPhase.ACCEPTED, ReplyPhase.RESULT]
    assert (reply.text, reply.stop_reason, reply.num_tokens) == ("yes", StopReason.STOP, 4)
    turn, fed = await harness.turn(request), replica.engine.calls[0].prompt_ids
    assert unpack_ids(turn.prompt_ids).tolist() == fed
    assert unpack_ids(turn.output_ids).tolist() == [*map(ord, "yes"), 1]
    assert unpack_logprobs(turn.logprobs).tolist() == [-0.5] * 4
    assert (turn.version, turn.opens_segment, turn.text, turn.replica) == (0, True, "yes", "rollout-0")
    assert turn.meter.prompt_tokens == len(fed)
    (tensors,) = (name for name in harness.blobs.contents if name.endswith(TENSORS_FILE))
    assert turn.adapter_sha256[:16] == tensors.rsplit("/", 1)[1][:16], "the bytes of the version that answered"
    metrics = replica.context.metrics
    assert metrics.ready()
    page = exposition(families(metrics.all_samples())).splitlines()
    assert 'marlaas_rollout_tokens_total{job="job",namespace="team"} 4.0' in page
    assert "marlaas_rollout_versions 1.0" in page
    prefix = "marlaas_rollout_engine_"
    engine = dict(line.removeprefix(prefix).split() for line in page if line.startswith(prefix))
    counted = {"requests_total": 2000, "preemptions_total": 2, "steps_total": 9, "queued_steps_total": 3, "queue": 1}
    assert engine == {name: str(float(value)) for name, value in {"restarts_total": 0, **counted}.items()}
    await replica.stop()
    assert not metrics.ready()


async def test_a_demonstrated_turn_is_recorded_without_the_engine_and_only_in_a_job_that_trains_demonstrations(harness):
    replica, taught = await harness.serving(training={"algorithm": "sft", "steps": 2})
    given = ChatMessage(role="assistant", content="sure")
    request = taught.request(demonstration=given)
    reply = await harness.result(request)
    assert (reply.text, reply.stop_reason, reply.num_tokens) == ("sure", StopReason.STOP, 5)
    assert (replica.engine.calls, len(replica.engine.loads)) == ([], 0), "no version is loaded"
    turn = await harness.turn(request)
    assert unpack_ids(turn.output_ids).tolist() == [*map(ord, "sure"), 1]
    assert (turn.demonstration, turn.logprobs, turn.meter.prompt_tokens, turn.meter.output_tokens) == (given, b"", 0, 0)
    for wrong in taught.request(index=1), (await harness.job("other")).request(demonstration=given):
        refused = await harness.failure(wrong)
        assert (refused.retryable, "only the steps of supervised fine-tuning" in refused.error) == (False, True)


TEACHER = {"name": "teacher", "trainable": False}
DISTILLED = {"algorithm": "distill", "distillation": {"teacher": "teacher"}, "steps": 1, "maxStaleness": 1}


async def test_a_teacher_scores_a_conversation_of_recorded_tokens_and_is_metered_for_its_prompt(harness):
    replica, job = await harness.serving(agents=[{"name": "policy"}, TEACHER], training=DISTILLED)
    await harness.commit(job, 0, seed=9, agent="teacher")
    for number in (0, 2):  # of two agents, the first one's turns
        await harness.result(job.request(turn=number, parent=number - 2 if number else None))
    asked = job.request(agent="teacher", turn=SCORES + 2, parent=None, append="", scores=2)
    reply = await harness.result(asked)
    assert (reply.text, reply.num_tokens, len(replica.engine.calls)) == ("", 0, 2)
    turn = await harness.turn(asked)
    expected = gain(harness.scratch / "published" / job.adapter(0, "teacher").engine_name)
    assert unpack_logprobs(turn.logprobs).tolist() == pytest.approx([expected] * 8), "two replies of four tokens"
    assert (turn.agent, turn.scores, turn.temperature, turn.output_ids) == ("teacher", 2, 1.0, b"")
    assert (turn.meter.prompt_tokens, turn.meter.output_tokens) == (len(replica.engine.calls[1].prompt_ids) + 4, 0)
    assert (await harness.result(asked)).text == "", "asked again, the same answer"
    early = await harness.failure(asked.model_copy(update={"turn": SCORES + 4, "scores": 4}))
    assert (early.retryable, "is not recorded yet" in early.error) == (True, True)
    for wrong in ({"agent": "policy"}, {"turn": SCORES + 4}, {"parent": 0}):
        refused = await harness.failure(asked.model_copy(update={"episode": f"{asked.episode}1"} | wrong))
        assert (refused.retryable, "score" in refused.error) == (False, True)


async def test_a_teacher_of_another_vocabulary_scores_nothing_and_the_job_hears_why(harness):
    tokenizer = CharacterTokenizer()
    await harness.replica(tokenizer=tokenizer)
    job = await harness.job(agents=[{"name": "policy"}, TEACHER], training=DISTILLED)
    await harness.commit(job, 0, agent="teacher")
    await harness.result(job.request())
    tokenizer.vocabulary = "of words"
    refused = await harness.failure(job.request(agent="teacher", turn=SCORES, parent=None, append="", scores=0))
    assert (refused.retryable, refused.is_refused, refused.is_permanent) == (False, True, True)
    assert "the teacher cannot score them. Choose a teacher whose model has the tokenizer" in refused.error


@pytest.mark.parametrize(("limits", "max_s"), rows(__file__, "time_limits"))
async def test_a_turn_that_the_time_limit_ends_is_a_cut_reply_with_the_tokens_that_it_has(harness, limits, max_s):
    replica, job = await harness.serving(**limits)
    replica.engine.overtime = True
    reply = await harness.result(job.request())
    assert (reply.text, reply.stop_reason, reply.is_overtime) == ("ye", StopReason.LENGTH, True)
    turn = await harness.turn(job.request())
    assert (unpack_ids(turn.output_ids).tolist(), len(unpack_logprobs(turn.logprobs))) == ([*map(ord, "ye")], 2)
    assert (turn.stop_reason, turn.is_overtime) == (StopReason.LENGTH, True)
    assert [call.sampling.max_s for call in replica.engine.calls] == [max_s]


async def test_sampling_follows_from_the_job_and_never_from_the_request(harness):
    replica, job = await harness.serving(rollout={"temperature": 0.7, "maxTokens": 9})
    await harness.ask(job.request(index=3, member=2, max_tokens=1000))
    await harness.ask(job.request(index=3, member=1, max_tokens=2))
    first, second = (call.sampling for call in replica.engine.calls)
    assert (first.temperature, first.max_tokens, second.max_tokens) == (0.7, 9, 2)
    assert (first.seed, second.seed) == (2291511271023518619, 1594335443364747636), "they never change"


async def test_a_job_whose_template_rewrites_its_past_is_told(harness):
    await harness.replica(tokenizer=CharacterTokenizer(trims=True))
    job = await harness.job()
    await harness.ask(job.request())
    event = await harness.emitted(job.document, REWRITES_PAST)
    assert event.ref == job.document.ref
    assert "rewrites earlier turns after a reply with spaces" in event.message


async def test_one_jobs_long_texts_keep_a_thread_for_everybody_else(harness, monkeypatch):
    loop, began, gate = asyncio.get_running_loop(), asyncio.Queue[str](), threading.Event()
    encode = CharacterTokenizer.encode

    def slowly(self, text):
        if "x" * 20_000 in text:
            loop.call_soon_threadsafe(began.put_nowait, text[:20])
            gate.wait()
        return encode(self, text)

    monkeypatch.setattr(CharacterTokenizer, "encode", slowly)
    await harness.replica()
    flooding, other = await harness.job("flooding"), await harness.job("other")
    await asyncio.gather(*(harness.ask(job.request()) for job in (flooding, other)))
    loop.set_default_executor(ThreadPoolExecutor(2))
    floods = [flooding.request(index=index, append=f"flood{'x' * 20_000}") for index in range(1, 4)]
    async with contextlib.AsyncExitStack() as open_asks:
        open_asks.callback(gate.set)
        asked = [await open_asks.enter_async_context(harness.asking(flood)) for flood in floods]
        assert (await began.get()).startswith("flood")
        for one in asked:
            await one.until(ReplyPhase.ACCEPTED)
        late = other.request(index=1, append=f"other{'x' * 20_000}")
        asked.append(await open_asks.enter_async_context(harness.asking(late)))
        assert (await began.get()).startswith("other")
        gate.set()
        ends = [await one.end() for one in asked]
    assert {reply.stop_reason for reply in ends} == {StopReason.CONTEXT}


@pytest.mark.parametrize("said", [str, lambda text: (ChatMessage(role="user", content=text),)])
async def test_a_prompt_beyond_the_context_window_ends_the_policys_episode_and_is_not_recorded(harness, said):
    """It costs nothing in the engine, and the log of turns is everybody's: full, it forgets what others have not trained yet."""
    first, job = await harness.serving()
    request = job.request(append=said("x" * 200_000), tools=("{}",))
    reply = await harness.result(request)
    assert (reply.stop_reason, reply.num_tokens) == (StopReason.CONTEXT, 0)
    assert reply.num_prompt_tokens >= reply.context_tokens > 0
    turn = await harness.turn(request)
    assert (turn.prompt_ids, turn.output_ids, turn.opens_segment) == (b"", b"", True)
    assert len(encode(turn)) < 4096
    assert "xxx… [200002 characters that did not fit the context window" in str(turn.append)
    after = job.request(turn=1, append="and now~")
    assert (await harness.result(after)).stop_reason is StopReason.CONTEXT
    await first.kill()
    second = await harness.replica("rollout-1")
    for one in (request, after, job.request(turn=2, append="and now~")):
        assert (await harness.result(one, of="rollout-1")).stop_reason is StopReason.CONTEXT
    refused = await harness.failure(job.request(append=said("y" * 200_000)), of="rollout-1")
    assert "another play has this name" in refused.error
    assert first.engine.calls == second.engine.calls == []


HI = (ChatMessage(role="user", content="hi"),)
LONG = "1" * 40_000
"""In a name that becomes a subject, the server hangs up on who sends it."""


REFUSED = [
    *rows(__file__, "refused"),
    ({"group": f"uid1-{LONG}-t0", "episode": f"uid1-{LONG}-t0-0-1"}, "is not of job uid uid1"),
    ({"group": f"uid1-t{LONG}", "episode": f"uid1-t{LONG}-0-1"}, "not a group name"),
    ({"episode": f"uid1-t0-0-{LONG}"}, "is not of member 0"),
    ({"append": ()}, "no messages"),
    ({"append": HI, "tools": ("x" * 100_000,)}, "the model's chat template shows little of them"),
    ({"append": (HI[0].model_copy(update={"name": "x" * 100_000}),)}, "the model's chat template shows little of them"),
]


async def test_what_can_never_be_served_is_refused_for_good_and_a_job_that_is_not_admitted_may_ask_again(harness):
    replica, job = await harness.serving(admitted=False)
    refused = await harness.failure(job.request())
    assert (refused.retryable, refused.waits) == (True, True)
    await harness.admit(job)
    await harness.verified("rollout-0", job.adapter(0))
    for changes, words in REFUSED:
        reply = await harness.failure(job.request(**changes))
        assert not reply.retryable, changes
        assert words in reply.error
        assert len(reply.error) < 1000
        assert reply.is_refused == ("append" in changes), changes
    assert replica.engine.calls == []


@pytest.mark.parametrize(("template", "says", "ends"), rows(__file__, "templates"))
async def test_a_job_is_rendered_with_its_own_template_until_it_is_gone(harness, roles, tmp_path, template, says, ends):
    save_tokenizer(tmp_path, 512)
    (tmp_path / "marked.jinja").write_text(data(__file__, "marked"))
    replica = await harness.replica(tokenizer=PretrainedTokenizer.load(str(tmp_path)))
    job = await harness.job(rollout={"chatTemplate": template})
    reply, known, calls = await harness.ask(job.request()), roles[0]._tokenizers, replica.engine.calls
    assert says in (reply.error or known.pool.raw(calls[0].prompt_ids))
    assert ([sorted(call.sampling.end_ids) for call in calls], len(known)) == (ends, 1 + bool(template and ends))
    assert (known.keep(()), len(known)) == (None, 1)
