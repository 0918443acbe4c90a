"""A micro-batch that the device has no memory for costs its step a second beginning, with a lower token budget, and the job nothing."""

import weakref
from typing import Any

import numpy as np
import pytest
import torch
from tests.killing import kill_at
from tests.trainer.fragile import FragileModel, Pass, fragile, no_room_above
from tests.trainer.harness import TrainerHarness
from tests.trainer.jobs import assignment_of, job

from marlaas_api.health import exposition
from marlaas_worker.health import families
from marlaas_worker.trainer.learner import Learner
from marlaas_worker.trainer.memory import RowTooLarge, lowered_budget
from marlaas_worker.trainer.rows import Row, Segment, chain, pack_prefix_tree

PLANNED, ROOM, FITS = 64, 40, 32
STEPS = 2


async def planned(harness: TrainerHarness, budget: int, **training: Any) -> bytes:
    """The adapter of a job that had this budget from its beginning, on a device that holds anything."""
    other = await harness.another()
    return (await other.trained(job(microbatchTokens=budget, **training), steps=STEPS))[0]


@pytest.mark.parametrize(("place", "algorithm"), [("forward", "grpo"), ("backward", "reinforce++")])
async def test_a_step_with_a_lowered_budget_is_the_step_that_was_planned_with_it(
    harness, monkeypatch, place, algorithm
):
    settings: dict[str, Any] = {"algorithm": algorithm, "maxStaleness": 1}
    document = job(microbatchTokens=4 * PLANNED, **settings)
    faults = fragile(monkeypatch, no_room_above(ROOM, place=place))
    async with harness.training(document):
        await harness.play(document, STEPS)
        page = exposition(families(harness.metrics["trainer-0"].all_samples()))
    monkeypatch.undo()
    adapters = {budget: await planned(harness, budget, **settings) for budget in (4 * PLANNED, FITS)}
    assert await harness.adapter(document) == adapters[FITS] != adapters[4 * PLANNED]
    second, first, _ = await harness.history(document)
    assert [made.metrics["microbatch_tokens"] for made in (first, second)] == [FITS, FITS]
    assert first.metrics["out_of_memory"] == len(faults.failed) > 0 == second.metrics["out_of_memory"]
    labels = 'agent="policy",job="sums",namespace="team-a"'
    assert f"marlaas_trainer_out_of_memory_total{{{labels}}} {float(len(faults.failed))}\n" in page
    event = await harness.emitted(document, "OutOfMemory")
    assert "tokens instead of 256" in event.message


async def test_a_later_trainer_goes_on_with_the_lowered_budget_even_if_it_has_more_memory(harness, monkeypatch):
    """The first one is killed before it commits the budget."""
    document = job(microbatchTokens=PLANNED)
    faults = fragile(monkeypatch, no_room_above(ROOM))
    passed = kill_at(place := "trainer.commit.before_blobs", 2)
    async with harness.training(document):
        await harness.play(document, 1)
    assert faults.failed
    assert passed.count(place) > 2
    faults.rule = lambda _: False
    async with harness.trainer("trainer-1"):
        await harness.play(document, 1, first=1)
    assert await harness.adapter(document) == await planned(harness, FITS)


async def test_a_single_conversation_that_does_not_fit_fails_its_job_with_the_number_and_no_other(harness, monkeypatch):
    large, small = job("large", agent={"adapter": {"rank": 32, "alpha": 32}}), job("small")
    fragile(monkeypatch, no_room_above(6, rank=32))
    await harness.admit(large)
    await harness.admit(small)
    async with harness.trainer():
        await harness.version(large, 0)
        await harness.step(large, 0)
        event = await harness.emitted(large, "TrainingFailed")
        await harness.play(small, 1)
    assert "one conversation of " in event.message
    assert "lower rollout.maxTokens" in event.message
    assert (await harness.record(large)).version == 0


async def test_an_adapter_that_does_not_fit_beside_others_waits_and_alone_fails_its_job(harness, monkeypatch):
    def probes_do_not_fit(found: Pass) -> bool:
        if found.rank == 32 and not found.trained:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return False

    large, small = job("large", agent={"adapter": {"rank": 32, "alpha": 32}}), job("small")
    fragile(monkeypatch, probes_do_not_fit)
    await harness.admit(small)
    async with harness.trainer():
        await harness.version(small, 0)
        await harness.admit(large)
        event = await harness.emitted(large, "OutOfMemory")
        assert "other agents on it: 1" in event.message
        assert "marlaas_trainer_broken_jobs 0.0" in exposition(families(harness.metrics["trainer-0"].all_samples()))
        await harness.play(small, 1)
    async with harness.trainer("trainer-1"):
        await harness.admit(small, admitted=False)
        harness.clock.at += 1e7
        await harness.emitted(large, "TrainingFailed")


def segments(*lengths: int) -> list[Segment]:
    """Conversations that begin alike."""
    ids = [
        np.array([1, 2, 3, *range(4, length + 1)], np.int32) + np.arange(length) // 3 * number
        for number, length in enumerate(lengths)
    ]
    return [Segment(one, np.arange(len(one)) > 2, np.full(len(one), -1, np.float32), 0, 1.0) for one in ids]


def chains(*lengths: int) -> list[Row]:
    return [chain(segment) for segment in segments(*lengths)]


@pytest.mark.parametrize(
    ("budget", "rows", "lowered"),
    [
        (64, chains(20, 20, 20), 32),  # 60 padded tokens did not fit
        (64, chains(12, 16), 16),  # 32 did not, and a budget of 32 would make the same micro-batch
        (1 << 24, chains(12, 16), 16),
        (64, chains(70, 70), 32),
        (2, chains(3, 3), 1),
        # one row of 21 tokens, of three conversations that can be parted
        (64, pack_prefix_tree(segments(9, 9, 9), 1 << 20, 64), 16),
    ],
)
def test_a_budget_is_halved_until_another_micro_batch_comes_out(budget, rows, lowered):
    assert lowered_budget(budget, rows) == lowered
    with pytest.raises(RowTooLarge, match="one conversation of 20 tokens"):
        lowered_budget(64, chains(20))


def test_what_a_failed_pass_held_is_free_before_the_step_begins_anew(tiny_model, monkeypatch):
    held: list[weakref.ref[torch.Tensor]] = []
    full: list[bool] = []

    class Watched(FragileModel):
        def _hidden(self, batch: Any) -> torch.Tensor:
            hidden = super()._hidden(batch)
            held.append(weakref.ref(hidden))
            if full:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return hidden

    learner = Learner(Watched(str(tiny_model)), assignment_of(job()))
    learner.begin()
    rows = chains(9, 9)
    assert learner.try_accumulate(rows)
    held.clear()
    full.append(True)
    assert not learner.try_accumulate(rows)
    assert [ref() for ref in held] == [None]
    full.clear()
    assert learner.try_accumulate(rows)
    metrics = learner.step(0)
    assert (metrics["microbatches"], metrics["tokens"]) == (1, 12)
