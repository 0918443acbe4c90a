"""What every engine keeps, the real one and its fake alike. Names are promises; figures are of the small random model in float32."""

import asyncio
from functools import partial

import numpy as np
import pytest

from marlaas_api.messages import StopReason
from marlaas_worker.rollout.engine import LoadedAdapter, LoadFailed, PromptInvalid, Sampling

pytestmark = pytest.mark.asyncio(loop_scope="session")

PROMPT = np.array([5, 9, 23, 40, 7, 61, 12], dtype=np.int32)
IDS = np.arange(2, 50, dtype=np.int32)


def sampling(seed: int = 1, max_tokens: int = 12, temperature: float = 1.0) -> Sampling:
    return Sampling(temperature=temperature, max_tokens=max_tokens, seed=seed)


async def test_scores_equal_those_of_transformers_and_peft(harness, publish, score_with_peft):
    published = publish(1)
    adapter = await harness.load(published)
    gap = np.abs(await harness.engine.score(adapter, IDS) - score_with_peft(published.folder, IDS))
    assert gap.mean() < 1e-4
    assert gap.max() < 1e-3


@pytest.mark.parametrize("temperature", [1.0, 0.7])
async def test_logprobs_of_drawn_tokens_are_those_of_transformers_and_peft_at_the_temperature(
    harness, publish, hf_logprobs, temperature
):
    published = publish(1)
    adapter = await harness.load(published)
    drawn = await harness.engine.generate("t", adapter, PROMPT, sampling(temperature=temperature))
    ids = np.concatenate([PROMPT, np.array(drawn.output_ids, dtype=np.int32)])
    expected = hf_logprobs(published.folder, ids, temperature)[len(PROMPT) - 1 :]
    assert len(drawn.logprobs) == len(drawn.output_ids)
    assert np.abs(np.array(drawn.logprobs) - expected).max() < 1e-3


async def test_the_adapter_changes_the_answer_and_a_zero_adapter_is_the_base(harness, publish, hf_logprobs):
    zero, trained = await harness.load(publish(1, 0, 0.0)), await harness.load(publish(1, 1))
    base = hf_logprobs(None, IDS, 1.0)
    assert np.abs(await harness.engine.score(zero, IDS) - base).max() < 1e-3
    assert np.abs(await harness.engine.score(trained, IDS) - base).mean() > 0.05


async def test_two_adapters_in_one_batch_do_not_mix(harness, publish):
    one, two = await harness.load(publish(1)), await harness.load(publish(2))
    alone = [await harness.engine.score(adapter, IDS) for adapter in (one, two)]
    assert np.abs(alone[0] - alone[1]).mean() > 0.05
    drawn = [harness.engine.generate(f"m{n}", (one, two)[n % 2], PROMPT, sampling(n)) for n in range(8)]
    scored = [harness.engine.score(adapter, IDS) for adapter in (one, two)]
    together = await asyncio.gather(*scored, *drawn)
    for before, after in zip(alone, together[:2], strict=True):
        assert np.abs(before - after).max() < 1e-4
    for n, completion in enumerate(together[2:]):
        ids = np.concatenate([PROMPT, np.array(completion.output_ids, dtype=np.int32)])
        own = (await harness.engine.score((one, two)[n % 2], ids))[len(PROMPT) - 1 :]
        assert np.abs(own - np.array(completion.logprobs)).max() < 1e-3


async def test_an_end_token_ends_a_generation_and_counts(harness, publish):
    adapter = await harness.load(publish(1))
    many = await asyncio.gather(
        *(harness.engine.generate(f"e{n}", adapter, PROMPT, sampling(n, 100, 2.0)) for n in range(16))
    )
    ended = [completion for completion in many if completion.stop_reason is StopReason.STOP]
    assert ended
    assert all(completion.output_ids[-1] == 1 for completion in ended)
    assert all(1 not in completion.output_ids[:-1] for completion in many)


async def test_generations_begin_once_each_and_more_prompts_than_fit_into_one_step_are_served(harness, publish):
    adapter, begun = await harness.load(publish(1)), list[int]()
    assert harness.engine.limits.kv_tokens >= harness.engine.limits.max_model_len
    drawn = await asyncio.gather(
        *(
            harness.engine.generate(
                f"b{n}", adapter, np.resize(np.roll(IDS, n), 100), sampling(n, 20), partial(begun.append, n)
            )
            for n in range(16)
        )
    )
    assert sorted(begun) == list(range(16))
    assert all(len(completion.output_ids) == len(completion.logprobs) > 0 for completion in drawn)


async def test_a_generation_stops_at_its_budget_or_at_the_end_of_the_window(harness, publish):
    adapter = await harness.load(publish(1))
    long = np.resize(IDS, harness.engine.limits.max_model_len - 2)
    short = await harness.engine.generate("short", adapter, PROMPT, sampling(3, max_tokens=2))
    assert (len(short.output_ids), short.stop_reason) == (2, StopReason.LENGTH)
    full = await harness.engine.generate("full", adapter, long, sampling(3, max_tokens=9))
    assert (len(full.output_ids), full.stop_reason) == (2, StopReason.CONTEXT)
    none = await harness.engine.generate("none", adapter, np.resize(IDS, len(long) + 2), sampling())
    assert (none.output_ids, none.stop_reason) == ((), StopReason.CONTEXT)


async def test_ids_that_the_model_does_not_know_are_refused_before_they_reach_it(harness, publish):
    adapter = await harness.load(publish(1))
    for ids in ([], [3, -1], [3, 96]):
        with pytest.raises(PromptInvalid):
            await harness.engine.generate("bad", adapter, np.array(ids, dtype=np.int32), sampling())
    assert len(await harness.engine.score(adapter, IDS)) == len(IDS) - 1


async def test_cancelling_ends_a_request_and_frees_its_adapter(harness, publish):
    adapter = await harness.load(publish(1))
    for attempt in range(100):  # one that has ended by the time cannot be cancelled
        running = asyncio.create_task(
            harness.engine.generate(f"gone{attempt}", adapter, PROMPT, sampling(attempt, 100))
        )
        await harness.engine.score(adapter, IDS)
        if running.cancel():
            break
    with pytest.raises(asyncio.CancelledError):
        await running
    await harness.engine.unload(adapter)


async def test_the_base_and_what_is_not_loaded_are_never_served(harness, publish):
    published = publish(1)
    adapter = harness.slot_for(published)
    for call in (
        harness.engine.generate("bare", adapter, PROMPT, sampling()),
        harness.engine.score(adapter, IDS),
        harness.engine.digest(adapter),
    ):
        with pytest.raises(LoadFailed, match="not loaded"):
            await call


async def test_an_unloaded_adapter_is_gone_and_can_come_back_under_another_number(harness, publish):
    published = publish(1)
    first = await harness.load(published)
    digest, scores = await harness.engine.digest(first), await harness.engine.score(first, IDS)
    await harness.engine.unload(first)
    with pytest.raises(LoadFailed, match="not loaded"):
        await harness.engine.digest(first)
    await harness.engine.unload(first)
    again = await harness.load(published)
    assert await harness.engine.digest(again) == digest
    assert np.array_equal(await harness.engine.score(again, IDS), scores)


async def test_full_slots_refuse_another_adapter_and_evict_nothing(harness, publish):
    held = [await harness.load(publish(seed)) for seed in range(harness.engine.limits.slots)]
    digests = [await harness.engine.digest(adapter) for adapter in held]
    with pytest.raises(LoadFailed, match="slots are taken"):
        await harness.load(publish(9))
    assert [await harness.engine.digest(adapter) for adapter in held] == digests
    await harness.engine.unload(held[0])
    await harness.load(publish(9))


async def test_an_adapter_in_use_is_not_unloaded(harness, publish):
    adapter = await harness.load(publish(1))
    running = asyncio.create_task(harness.engine.generate("busy", adapter, PROMPT, sampling(0, 60)))
    await asyncio.sleep(0)
    with pytest.raises(LoadFailed, match="still runs 1"):
        await harness.engine.unload(adapter)
    assert (await running).output_ids


async def test_a_refused_load_leaves_other_requests_running(harness, publish, tmp_path):
    adapter = await harness.load(publish(1))
    running = [
        asyncio.create_task(harness.engine.generate(f"r{n}", adapter, PROMPT, sampling(n, 40))) for n in range(4)
    ]
    await asyncio.sleep(0)
    missing = LoadedAdapter("missing", harness.next_slot(), tmp_path / "nothing")
    with pytest.raises(LoadFailed, match="missing"):
        await harness.engine.load(missing)
    with pytest.raises(LoadFailed, match="not loaded"):
        await harness.engine.generate("bare", missing, PROMPT, sampling())
    completions = await asyncio.gather(*running)
    assert all(completion.output_ids for completion in completions)
    assert await harness.engine.healthy()


async def test_a_rank_above_the_engines_is_refused_with_the_number(harness, wide_adapter):
    with pytest.raises(LoadFailed, match="16"):
        await harness.engine.load(LoadedAdapter("wide", harness.next_slot(), wide_adapter))


async def test_a_prompt_that_was_seen_is_found_in_the_cache_only_by_the_same_version(harness, publish):
    one, two = await harness.load(publish(1)), await harness.load(publish(2))
    long = np.resize(IDS, 70)
    first = await harness.engine.generate("c1", one, long, sampling(1, 4))
    again = await harness.engine.generate("c2", one, long, sampling(1, 4))
    other = await harness.engine.generate("c3", two, long, sampling(1, 4))
    assert first.cached_tokens == other.cached_tokens == 0
    assert again.cached_tokens in (0, 64)
    assert np.abs(np.array(again.logprobs) - np.array(first.logprobs)).max() < 1e-3
