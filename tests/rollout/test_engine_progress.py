"""Counters of an engine's work, and the judgement of its progress, without vLLM."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from marlaas_worker.rollout.engine_progress import (
    COUNTERS,
    MIN_BUSY_BOUND_S,
    MIN_CPU_SHARE,
    STALL_S,
    Cell,
    CountsWork,
    EngineCounts,
    ProgressWatch,
    Standstill,
    attach_counters,
    busy_bound_s,
    create_counters,
)


def test_progress_is_a_move_of_the_counters_and_cpu_time_is_none() -> None:
    watch, all_cpu = ProgressWatch(), 1.0
    assert watch.look(True, EngineCounts(tokens=5), 0.0, 100.0) == Standstill(0.0, 0.0)
    assert watch.look(True, EngineCounts(tokens=5), 50 * MIN_CPU_SHARE, 150.0) == Standstill(50.0, 0.0)
    assert watch.look(True, EngineCounts(tokens=5), 50 * MIN_CPU_SHARE, 170.0) == Standstill(70.0, 20.0)
    assert watch.look(True, EngineCounts(tokens=5, layers=1), 50 * MIN_CPU_SHARE, 180.0) == Standstill(0.0, 0.0)
    assert watch.look(True, EngineCounts(tokens=5, layers=1), 60 * all_cpu, 240.0) == Standstill(60.0, 0.0)
    assert watch.look(False, EngineCounts(tokens=5, layers=1), 61.0, 300.0) == Standstill(0.0, 0.0), "nothing to do"
    assert watch.look(True, EngineCounts(tokens=5, layers=1), 61.0, 310.0) == Standstill(10.0, 10.0)


def test_requests_that_only_arrive_in_the_engines_queue_are_no_progress() -> None:
    watch = ProgressWatch()
    watch.look(True, EngineCounts(), 0.0, 100.0)
    arrived = EngineCounts(queued=9, queued_steps=700)
    assert watch.look(True, arrived, 0.0, 100.0 + STALL_S).still_s == STALL_S


def test_the_bound_of_a_silent_step_is_the_time_of_the_slowest_machine_but_never_short() -> None:
    assert busy_bound_s(512, 64 * 128, 1e9) == MIN_BUSY_BOUND_S
    assert busy_bound_s(4096, 151_936 * 4096, 1e9) == pytest.approx(2549.1, abs=0.1)


@dataclass
class Batch:
    total_num_scheduled_tokens: int
    preempted_req_ids: set[str] | None = None


@dataclass
class SomeScheduler:
    """Schedules the given batches, one after another, and leaves as many requests in its queue as `left` says."""

    batches: list[Batch]
    left: list[int]
    computed: list[Batch] = field(default_factory=list)
    added: list[str] = field(default_factory=list)

    def schedule(self, throttle: bool = False) -> Batch:
        return self.batches.pop(0)

    def add_request(self, request: str) -> None:
        self.added.append(request)

    def get_request_counts(self) -> tuple[int, int]:
        return 1, self.left.pop(0)

    def update_from_output(self, batch: Batch, output: str) -> str:
        self.computed.append(batch)
        return output


class CountingSomeScheduler(CountsWork, SomeScheduler):
    """As vLLM's process builds it: by the environment variable."""


def test_a_scheduler_counts_its_work_in_memory_that_the_role_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counters = create_counters(tmp_path / "counters")
    monkeypatch.setenv(COUNTERS, str(tmp_path / "counters"))
    batches = [Batch(7), Batch(3, {"a", "b"}), Batch(0, set())]
    scheduler: Any = CountingSomeScheduler(list(batches), [0, 4, 4])
    scheduler.add_request("first")
    assert scheduler.schedule() is batches[0]
    assert counters.read() == EngineCounts(requests=1, tokens=7), "scheduled, not computed yet"
    assert scheduler.update_from_output(batches[0], "out") == "out"
    for batch in batches[1:]:
        scheduler.schedule(throttle=True)
        scheduler.update_from_output(batch, "out")
    assert counters.read() == EngineCounts(requests=1, steps=2, tokens=10, preemptions=2, queued_steps=2, queued=4)
    assert (scheduler.added, scheduler.computed) == (["first"], batches)


def test_a_scheduler_that_schedules_nothing_moves_no_counter_of_work() -> None:
    scheduler: Any = CountingSomeScheduler([Batch(0)] * 3, [1, 1, 1])
    for _ in range(3):
        scheduler.update_from_output(scheduler.schedule(), "out")
    assert EngineCounts(*scheduler._cells[: len(Cell)]).work == EngineCounts().work


def test_each_incarnation_has_new_counters_and_the_engine_the_sum(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(COUNTERS, str(tmp_path / "counters"))
    first = create_counters(tmp_path / "counters")
    outlived = attach_counters()
    first.cells[Cell.STEPS], first.cells[Cell.QUEUED] = 5, 3
    second = create_counters(tmp_path / "counters")
    outlived.cells[Cell.STEPS] += 1
    assert second.read() == EngineCounts(), "a process of the first incarnation does not count here"
    second.cells[Cell.STEPS], second.cells[Cell.QUEUED] = 2, 1
    assert second.read().after(first.read()) == EngineCounts(steps=8, queued=1)
