"""A device's errors and its lack of memory are not a job's: what they cost a step, one agent or the process, and that nobody else notices."""

import asyncio
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from tests.harness import WITHIN_S
from tests.killing import kill_at
from tests.tables import rows
from tests.trainer.harness import assignment_of, job

from marlaas_api import subjects, wire
from marlaas_api.errors import InvalidInput, first_cause
from marlaas_api.health import exposition
from marlaas_api.messages import ReplicaReport
from marlaas_worker.devices import DeviceLost
from marlaas_worker.health import families
from marlaas_worker.trainer import room, service
from marlaas_worker.trainer.batching import Segment, chain, pack_prefix_tree
from marlaas_worker.trainer.compute import Compute
from marlaas_worker.trainer.learner import Learner
from marlaas_worker.trainer.lora import AttachedAdapter
from marlaas_worker.trainer.memory import RowTooLarge, lowered_budget, memory_errors
from marlaas_worker.trainer.model import BaseModel
from marlaas_worker.trainer.versions import read_version


@dataclass(frozen=True)
class Pass:
    """A forward or backward pass of an adapter of this rank; trained: of a step's micro-batch, not of probes or measurements."""

    place: str
    rank: int
    trained: bool
    num_tokens: int
    num_adapters: int


@dataclass
class Faults:
    """What fails. `rule` may raise, or return True for gradients that are not finite; failed: the passes that did."""

    rule: Callable[[Pass], bool] = lambda _: False
    failed: list[Pass] = field(default_factory=list)

    def at(self, found):
        broken = True
        try:
            broken = self.rule(found)
        finally:
            if broken:
                self.failed.append(found)
        return broken


class FragileModel(BaseModel):
    """See `faults`, which is shared by all of them while a test runs."""

    faults = Faults()
    _active_adapter: AttachedAdapter | None = None
    _temperature = 1.0

    def logprobs(self, adapter, batch, temperature):
        self._active_adapter, self._temperature = adapter, temperature
        return super().logprobs(adapter, batch, temperature)

    def backward(self, loss, batch):
        super().backward(loss, batch)
        with memory_errors(batch):
            if self.faults.at(self._pass("backward", batch)) and self._active_adapter is not None:
                for parameter in self._active_adapter.parameters.values():
                    if parameter.grad is not None:
                        parameter.grad.fill_(float("nan"))

    def _hidden(self, batch):
        hidden = super()._hidden(batch)
        self.faults.at(self._pass("forward", batch))
        return hidden

    def _pass(self, place, batch):
        rank = 0 if self._active_adapter is None else self._active_adapter.config.rank
        trained = self._temperature != 1.0 and (torch.is_grad_enabled() or place == "backward")
        return Pass(place, rank, trained, batch.num_padded_tokens, len(self.adapters))


def fragile(monkeypatch, rule):
    """Let trainers have such a model from now on; `rule` may be replaced later."""
    faults = Faults(rule)
    monkeypatch.setattr(FragileModel, "faults", faults)
    monkeypatch.setattr(service, "BaseModel", FragileModel)
    return faults


def no_room_above(num_tokens, *, rank=8, place="forward"):
    """A device on which a trained micro-batch of more padded tokens does not fit."""

    def rule(found):
        if found.place == place and found.rank == rank and found.trained and found.num_tokens > num_tokens:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return False

    return rule


ILLEGAL = "CUDA error: an illegal memory access was encountered\nCUDA kernel errors might be asynchronously reported"
STEPS = 3
FRAIL = {"adapter": {"rank": 16, "alpha": 16}}


@pytest.fixture(scope="module")
def undisturbed(apart):
    jobs = job("sound"), job("frail", agent=FRAIL)
    return {one.job: apart(lambda harness, one=one: harness.trained(one, steps=STEPS))[0] for one in jobs}


async def serve_until_lost(harness):
    with pytest.raises(BaseExceptionGroup) as caught:
        await harness.serve(await harness.context("trainer-0"))
    cause = first_cause(caught.value)
    assert isinstance(cause, DeviceLost)
    assert not isinstance(cause, InvalidInput)  # which would have an exit code that nobody restarts
    return cause


async def test_a_lost_device_ends_the_role_blames_no_job_and_the_next_one_goes_on(harness, undisturbed, monkeypatch):
    frail, sound = job("frail", agent=FRAIL), job("sound")
    faults = fragile(monkeypatch, lambda _: False)
    for document in (frail, sound):
        await harness.admit(document)

    def break_down(found):
        if found.trained and found.rank == 16:
            raise torch.AcceleratorError(ILLEGAL)
        return False

    async with asyncio.timeout(WITHIN_S), asyncio.TaskGroup() as tasks:
        life = tasks.create_task(serve_until_lost(harness))
        others = tasks.create_task(harness.play(sound, STEPS))
        await harness.play(frail, 1)
        faults.rule = break_down
        rest = tasks.create_task(harness.play(frail, STEPS - 1, first=1))
        lost = await life
        words = "the trainer's device is lost (AcceleratorError: CUDA error: an illegal memory access was encountered)"
        assert str(lost).startswith(words)
        assert not harness.metrics["trainer-0"].alive()
        reports = await (await harness.bus.bucket(subjects.REPLICAS)).entries()
        assert [wire.decode_as(ReplicaReport, entry.data).broken for entry in reports] == [{}]
        assert {(await harness.record(document)).holder for document in (frail, sound)} == {""}
        faults.rule = lambda _: False
        async with harness.trainer():
            await asyncio.gather(others, rest)
        assert harness.metrics["trainer-0"].alive()
    assert {name: await harness.adapter(job(name)) for name in ("frail", "sound")} == undisturbed
    told = await harness.bus.replay(subjects.EVENTS, subjects.event("team-a", "frail", "trainer"))
    assert "TrainingFailed" not in {getattr(wire.decode(one.data), "reason", "") for one in told}


async def test_after_a_sticky_error_nothing_more_is_computed_in_the_process():
    compute, done = Compute(1), []

    def fail():
        raise RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR")

    with pytest.raises(DeviceLost, match="CUDNN_STATUS_INTERNAL_ERROR"):
        await compute.run(fail)
    with pytest.raises(DeviceLost, match="CUDNN_STATUS_INTERNAL_ERROR"):
        await compute.run(lambda: done.append(1))
    assert not done
    compute.close()


def at(place, error, passes):
    """Fail the frail job's given pass and all that follow, with an error or with gradients that are not finite."""
    seen = []

    def rule(found):
        if (found.place, found.rank) != (place, 16) or not found.trained:
            return False
        seen.append(found)
        if len(seen) >= passes and error is not None:
            raise error
        return len(seen) >= passes

    return rule


@pytest.mark.parametrize(("place", "text", "passes", "reason"), rows(__file__, "failing_passes"))
async def test_an_error_in_a_pass_changes_no_bit_of_others(
    harness, undisturbed, monkeypatch, place, text, passes, reason
):
    frail, sound = job("frail", agent=FRAIL), job("sound")
    error = text and (torch.OutOfMemoryError if "memory" in text else RuntimeError)(text)
    faults = fragile(monkeypatch, at(place, error, passes))
    await harness.admit(frail)
    await harness.admit(sound)
    async with harness.trainer(), asyncio.TaskGroup() as tasks:
        doomed = tasks.create_task(harness.play(frail, STEPS))
        await harness.play(sound, STEPS)
        await harness.emitted(frail, reason)
        doomed.cancel()
    assert faults.failed
    assert await harness.adapter(sound) == undisturbed["sound"]


async def test_gradients_that_are_not_finite_change_nothing_and_fail_the_third_time(harness, monkeypatch):
    document = job(agent=FRAIL)
    faults = fragile(monkeypatch, lambda _: False)
    async with harness.training(document):
        await harness.play(document, 1)
        faults.rule = lambda found: found.place == "backward"
        await harness.play(document, 1, first=1)
        event = (await harness.emitted(document, "UpdateSkipped")).message
        assert event.endswith("version 2 has the weights of version 1")
    async with harness.trainer("trainer-1"):  # which knows of the first from the commit alone
        await harness.play(document, 1, first=2)
        await harness.step(document, 3)
        event = (await harness.emitted(document, "TrainingFailed")).message
    assert "is not finite (its norm is nan) in 3 updates in a row, the last of them of step 3" in event
    history = await harness.history(document)
    assert [made.metrics.get("skipped_update") for made in history] == [1.0, 1.0, 0.0, None]
    assert (await read_version(harness.blobs, history[0]))[1].num_updates == 1
    assert len({made.files["adapter_model.safetensors"].sha256 for made in history[:3]}) == 1


PLANNED = 256


async def planned(harness, budget, **training: Any):
    other = await harness.another()
    return (await other.trained(job(microbatchTokens=budget, **training), steps=2))[0]


@pytest.mark.parametrize(("place", "algorithm", "fits", "updates"), rows(__file__, "fitting_budgets"))
async def test_a_step_with_a_lowered_budget_is_the_planned_one(harness, monkeypatch, place, algorithm, fits, updates):
    settings: dict[str, Any] = {"algorithm": algorithm, "maxStaleness": 1, **updates}
    document = job(microbatchTokens=PLANNED, **settings)
    full = no_room_above(fits * 5 // 4, place=place)
    # the second adapter holds the parameters of the step's beginning, from the first update on
    faults = fragile(monkeypatch, lambda found: (found.num_adapters > 1 or not updates) and full(found))
    async with harness.training(document):
        await harness.play(document, 2)
        page = exposition(families(harness.metrics["trainer-0"].all_samples()))
    monkeypatch.undo()
    adapters = {budget: await planned(harness, budget, **settings) for budget in (PLANNED, fits)}
    assert await harness.adapter(document) == adapters[fits] != adapters[PLANNED]
    second, first, _ = await harness.history(document)
    assert [made.metrics["microbatch_tokens"] for made in (first, second)] == [fits, fits]
    assert first.metrics["out_of_memory"] == len(faults.failed) > 0 == second.metrics["out_of_memory"]
    labels = 'agent="policy",job="sums",namespace="team-a"'
    assert f"marlaas_trainer_out_of_memory_total{{{labels}}} {float(len(faults.failed))}\n" in page
    event = await harness.emitted(document, "OutOfMemory")
    assert "tokens instead of 256" in event.message


async def test_a_later_trainer_goes_on_with_the_lowered_budget_even_if_it_has_more_memory(harness, monkeypatch):
    document = job(microbatchTokens=64)
    faults = fragile(monkeypatch, no_room_above(40))
    passed = kill_at(place := "trainer.commit.before_blobs", 2)
    async with harness.training(document):
        await harness.play(document, 1)
    assert faults.failed
    assert passed.count(place) > 2
    faults.rule = lambda _: False
    async with harness.trainer("trainer-1"):
        await harness.play(document, 1, first=1)
    assert await harness.adapter(document) == await planned(harness, 32)


async def test_an_adapter_that_does_not_fit_beside_others_waits_and_alone_fails_its_job(harness, monkeypatch):
    def probes_do_not_fit(found):
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


async def test_a_conversation_that_does_not_fit_beside_another_agent_gets_its_memory(harness, undisturbed, monkeypatch):
    def is_full(found):
        if found.trained and found.rank == 8 and found.num_adapters > 1:
            raise torch.OutOfMemoryError("CUDA out of memory")

    sound, frail = job("sound"), job("frail", agent=FRAIL)
    fragile(monkeypatch, is_full)
    monkeypatch.setattr(room, "measure", lambda *_: room.AgentMemory(24, 1, 0, 1 << 30))
    async with asyncio.timeout(WITHIN_S):
        assert await harness.trained(sound, frail, steps=STEPS) == [undisturbed["sound"], undisturbed["frail"]]


def segments(*lengths: int):
    numbered = [(number, np.arange(length, dtype=np.int32)) for number, length in enumerate(lengths)]
    ids = [places + 1 + places // 3 * number for number, places in numbered]
    return [Segment(one, np.arange(len(one)) > 2, np.full(len(one), -1, np.float32), 0, 1.0) for one in ids]


def chains(*lengths: int):
    return [chain(segment) for segment in segments(*lengths)]


@pytest.mark.parametrize(("budget", "lengths", "lowered"), rows(__file__, "lowered_budgets"))
def test_a_budget_is_halved_until_another_micro_batch_comes_out(budget, lengths, lowered):
    assert lowered_budget(budget, chains(*lengths)) == lowered
    # one row of 21 tokens, of three conversations that can be parted
    assert lowered_budget(64, pack_prefix_tree(segments(9, 9, 9), 1 << 20, 64)) == 16
    with pytest.raises(RowTooLarge, match="one conversation of 20 tokens"):
        lowered_budget(64, chains(20))


def test_what_a_failed_pass_held_is_free_before_the_step_begins_anew(tiny_model, monkeypatch):
    held: list[weakref.ref[torch.Tensor]] = []
    full: list[bool] = []

    class Watched(FragileModel):
        def _hidden(self, batch):
            hidden = super()._hidden(batch)
            held.append(weakref.ref(hidden))
            if full:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return hidden

    learner = Learner(Watched(str(tiny_model)), assignment_of(job()))
    learner.begin()
    rows = chains(9, 9)
    assert learner.try_accumulate(rows) is not None
    held.clear()
    full.append(True)
    assert learner.try_accumulate(rows) is None
    assert [ref() for ref in held] == [None]
    full.clear()
    assert learner.try_accumulate(rows) is not None
    metrics = learner.step(0, 1)
    assert (metrics["microbatches"], metrics["tokens"]) == (1, 12)
