"""What every engine keeps, the real one and its fake alike. Names are promises; figures are of the small random model in float32."""

import asyncio
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from marlaas_api.messages import StopReason
from marlaas_worker.rollout.engine import LoadedAdapter, LoadFailed, PromptInvalid, Sampling
from marlaas_worker.rollout.replies import Stops

pytestmark = pytest.mark.asyncio(loop_scope="session")

PROMPT = np.array([5, 9, 23, 40, 7, 61, 12], dtype=np.int32)
IDS = np.arange(2, 50, dtype=np.int32)


def sampling(seed=1, max_tokens=12, temperature=1.0):
    return Sampling(temperature, max_tokens, seed)


def with_prompt(drawn):
    return np.concatenate([PROMPT, np.array(drawn.output_ids, dtype=np.int32)])


@pytest.mark.parametrize("temperature", [1.0, 0.7, 0.0])
async def test_scores_equal_those_of_transformers_and_peft(harness, publish, hf_logprobs, temperature):
    published = publish(1)
    adapter = await harness.load(published)
    gap = np.abs(await harness.engine.score(adapter, IDS) - hf_logprobs(published.folder, IDS, 1.0))
    assert gap.mean() < 1e-4
    assert gap.max() < 1e-3
    drawn = await harness.engine.generate("t", adapter, PROMPT, sampling(temperature=temperature))
    expected = hf_logprobs(published.folder, with_prompt(drawn), temperature or 1.0)[len(PROMPT) - 1 :]
    assert len(drawn.logprobs) == len(drawn.output_ids)
    assert np.abs(np.array(drawn.logprobs) - expected).max() < 1e-3
    again = await harness.engine.generate("u", adapter, PROMPT, sampling(2, temperature=temperature))
    assert (again.output_ids == drawn.output_ids) == (temperature == 0.0)


async def test_an_engine_scores_what_it_has_sampled_as_it_sampled_it(harness, publish):
    """Also a long conversation among others, after one that was given up."""
    adapter = await harness.load(publish(1))
    prompts = [np.resize(np.roll(IDS, n), 20 + 25 * n) for n in range(4)]
    drawn = await asyncio.gather(
        *(harness.engine.generate(f"o{n}", adapter, one, sampling(n, 20)) for n, one in enumerate(prompts))
    )
    whole = [np.concatenate([one, np.array(own.output_ids, np.int32)]) for one, own in zip(prompts, drawn, strict=True)]
    given_up = asyncio.create_task(harness.engine.score(adapter, whole[3]))
    await asyncio.sleep(0)
    given_up.cancel()
    scores = await asyncio.gather(*(harness.engine.score(adapter, one) for one in whole))
    for one, own, score in zip(prompts, drawn, scores, strict=True):
        assert np.abs(score[len(one) - 1 :] - np.array(own.logprobs)).max() < 1e-3


@pytest.mark.slow
async def test_adapters_that_take_turns_on_the_slots_in_one_batch_do_not_mix(harness, publish, hf_logprobs):
    """Eight adapters on six slots, four in use at a time: what each draws is what transformers and PEFT score under it."""
    published, places = [publish(seed) for seed in range(8)], asyncio.Semaphore(4)

    async def use(number):
        async with places:
            adapter = await harness.load(published[number % 8])
            drawn = [harness.engine.generate(f"m{number}.{n}", adapter, PROMPT, sampling(n)) for n in range(3)]
            score, *drawn = await asyncio.gather(harness.engine.score(adapter, IDS), *drawn)
            await harness.engine.unload(adapter)
        return score, drawn

    used = await asyncio.gather(*map(use, range(24)))
    expected = [hf_logprobs(one.folder, IDS, 1.0) for one in published]
    assert np.abs(expected[0] - expected[1]).mean() > 0.05
    for number, (score, drawn) in enumerate(used):
        assert np.abs(score - expected[number % 8]).max() < 1e-3
        for one in drawn:
            own = hf_logprobs(published[number % 8].folder, with_prompt(one), 1.0)[len(PROMPT) - 1 :]
            assert np.abs(own - np.array(one.logprobs)).max() < 1e-3


async def test_an_end_token_ends_a_generation_and_counts(harness, publish):
    adapter = await harness.load(publish(1))
    drawn = [harness.engine.generate(f"e{n}", adapter, PROMPT, sampling(n, 100, 2.0)) for n in range(16)]
    many = await asyncio.gather(*drawn)
    ended = [completion for completion in many if completion.stop_reason is StopReason.STOP]
    assert ended
    assert all(completion.output_ids[-1] == 1 for completion in ended)
    assert all(1 not in completion.output_ids[:-1] for completion in many)


async def test_generations_begin_once_each_and_more_prompts_than_fit_into_one_step_are_served(harness, publish):
    adapter, begun = await harness.load(publish(1)), list[int]()
    assert harness.engine.limits.kv_tokens >= harness.engine.limits.max_model_len
    prompts = [np.resize(np.roll(IDS, n), 100) for n in range(16)]
    generate = harness.engine.generate
    numbered = ((n, prompt, partial(begun.append, n)) for n, prompt in enumerate(prompts))
    drawn = await asyncio.gather(*(generate(f"b{n}", adapter, one, sampling(n, 20), on) for n, one, on in numbered))
    assert sorted(begun) == list(range(16))
    assert all(len(completion.output_ids) == len(completion.logprobs) > 0 for completion in drawn)


async def test_a_generation_stops_at_its_budget_or_window_and_unknown_ids_are_refused(harness, publish):
    adapter = await harness.load(publish(1))
    long = np.resize(IDS, harness.engine.limits.max_model_len - 2)
    short = await harness.engine.generate("short", adapter, PROMPT, sampling(3, max_tokens=2))
    assert (len(short.output_ids), short.stop_reason) == (2, StopReason.LENGTH)
    full = await harness.engine.generate("full", adapter, long, sampling(3, max_tokens=9))
    assert (len(full.output_ids), full.stop_reason) == (2, StopReason.CONTEXT)
    none = await harness.engine.generate("none", adapter, np.resize(IDS, len(long) + 2), sampling())
    assert (none.output_ids, none.stop_reason) == ((), StopReason.CONTEXT)
    for ids in ([], [3, -1], [3, 96]):
        with pytest.raises(PromptInvalid):
            await harness.engine.generate("bad", adapter, np.array(ids, dtype=np.int32), sampling())
    assert len(await harness.engine.score(adapter, IDS)) == len(IDS) - 1


async def test_a_generation_that_takes_too_long_ends_with_the_tokens_that_were_sampled_first(harness, publish):
    adapter = await harness.load(publish(1))
    whole = [await harness.engine.generate(f"w{n}", adapter, PROMPT, sampling(n, 100)) for n in range(4)]
    for number, expected in enumerate(whole):
        limited = replace(sampling(number, 100), max_s=0.0)
        drawn = await harness.engine.generate(f"l{number}", adapter, PROMPT, limited)
        length = len(drawn.output_ids)
        assert 0 < length == len(drawn.logprobs) < len(expected.output_ids)
        assert drawn.output_ids == expected.output_ids[:length]
        assert drawn.logprobs == pytest.approx(expected.logprobs[:length], abs=1e-4)
        assert (drawn.stop_reason, drawn.is_overtime, expected.is_overtime) == (StopReason.LENGTH, True, False)
    in_time = await harness.engine.generate("t", adapter, PROMPT, replace(sampling(1, 12), max_s=600.0))
    assert (in_time.output_ids, in_time.is_overtime) == (whole[1].output_ids[:12], False)


async def test_cancelling_ends_a_request_and_frees_its_adapter(harness, publish):
    adapter = await harness.load(publish(1))
    for attempt in range(100):  # one that has ended by the time cannot be cancelled
        drawn = harness.engine.generate(f"gone{attempt}", adapter, PROMPT, sampling(attempt, 100))
        running = asyncio.create_task(drawn)
        await harness.engine.score(adapter, IDS)
        if running.cancel():
            break
    with pytest.raises(asyncio.CancelledError):
        await running
    await harness.engine.unload(adapter)


async def test_what_is_not_loaded_is_never_served_and_an_unloaded_adapter_can_come_back(harness, publish):
    published, engine = publish(1), harness.engine
    first = await harness.load(published)
    digest, scores = await engine.digest(first), await engine.score(first, IDS)
    await engine.unload(first)
    for adapter in (first, harness.slot_for(published)):
        drawn = engine.generate("bare", adapter, PROMPT, sampling())
        for call in (drawn, engine.score(adapter, IDS), engine.digest(adapter)):
            with pytest.raises(LoadFailed, match="not loaded"):
                await call
    await engine.unload(first)
    again = await harness.load(published)
    assert await engine.digest(again) == digest
    assert np.array_equal(await engine.score(again, IDS), scores)


async def test_full_slots_refuse_another_adapter_and_evict_nothing(harness, publish):
    held = [await harness.load(publish(seed)) for seed in range(harness.engine.limits.slots)]
    digests = [await harness.engine.digest(adapter) for adapter in held]
    with pytest.raises(LoadFailed, match="slots are taken"):
        await harness.load(publish(9))
    assert [await harness.engine.digest(adapter) for adapter in held] == digests
    await harness.engine.unload(held[0])
    await harness.load(publish(9))


async def test_a_refused_load_disturbs_no_request_and_an_adapter_in_use_is_not_unloaded(harness, publish, tmp_path):
    adapter = await harness.load(publish(1))
    drawn = [harness.engine.generate(f"r{n}", adapter, PROMPT, sampling(n, 40)) for n in range(4)]
    running = [asyncio.create_task(one) for one in drawn]
    await asyncio.sleep(0)
    with pytest.raises(LoadFailed, match="still runs 4"):
        await harness.engine.unload(adapter)
    missing = LoadedAdapter("missing", harness.next_slot(), tmp_path / "nothing")
    for refused, words in ((missing, "missing"), (harness.slot_for(publish(9, rank=16)), "16")):
        with pytest.raises(LoadFailed, match=words):
            await harness.engine.load(refused)
        with pytest.raises(LoadFailed, match="not loaded"):
            await harness.engine.generate("bare", refused, PROMPT, sampling())
    assert all(completion.output_ids for completion in await asyncio.gather(*running))
    assert await harness.engine.healthy()


async def test_a_prompt_that_was_seen_is_found_in_the_cache_only_by_the_same_version(harness, publish):
    one, two = await harness.load(publish(1)), await harness.load(publish(2))
    long = np.resize(IDS, 70)
    first = await harness.engine.generate("c1", one, long, sampling(1, 4))
    again = await harness.engine.generate("c2", one, long, sampling(1, 4))
    other = await harness.engine.generate("c3", two, long, sampling(1, 4))
    assert first.cached_tokens == other.cached_tokens == 0
    assert again.cached_tokens in (0, 64)
    assert np.abs(np.array(again.logprobs) - np.array(first.logprobs)).max() < 1e-3


async def test_a_generation_ends_with_the_token_that_completes_a_string_or_is_an_added_end(harness, publish):
    adapter = await harness.load(publish(1))
    whole = await harness.engine.generate("whole", adapter, PROMPT, sampling(1, 30))

    def raw(ids):
        return "".join(f"{one}," for one in ids)

    for at in (0, 5, 11):
        stops = Stops((raw(whole.output_ids[at : at + 2]),), raw)
        drawn = await harness.engine.generate(f"s{at}", adapter, PROMPT, replace(sampling(1, 30), stops=stops))
        length = next(number for number in range(31) if stops.texts[0] in raw(whole.output_ids[:number]))
        assert (drawn.output_ids, drawn.stop_reason) == (whole.output_ids[:length], StopReason.MATCH)
        assert (len(drawn.logprobs), drawn.is_overtime) == (length, False)
        assert drawn.logprobs == pytest.approx(whole.logprobs[:length], abs=1e-4)
    end = whole.output_ids[6]
    ended = await harness.engine.generate("e", adapter, PROMPT, replace(sampling(1, 30), end_ids=frozenset({end})))
    assert (ended.output_ids[-1], ended.stop_reason) == (end, StopReason.STOP)


async def test_a_string_is_found_across_the_bytes_of_characters():
    ids = list("é→x é→".encode())
    stops = Stops(("→x é", "y"), lambda part: bytes(part).decode(errors="replace"))
    assert (stops.end(ids[:8]), stops.end(ids), stops.end(ids, 8)) == (None, 9, 9)
