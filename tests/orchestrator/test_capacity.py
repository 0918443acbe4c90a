"""What pools offer and jobs need, and which job delays another: tables, and properties of any set of running jobs."""

from itertools import combinations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.orchestrator.demands import demand
from tests.tables import rows

from marlaas_api.messages import ReplicaReport
from marlaas_worker.orchestrator import capacity

relaxed = settings(max_examples=150, suppress_health_check=list(HealthCheck))


def engine(name: str, **fields: object) -> ReplicaReport:
    limits = {"slots": 8, "max_rank": 16, "max_model_len": 512}
    return ReplicaReport(role="rollout", pool="tiny", replica=name, **limits | fields)


def trainer(name: str, **fields: object) -> ReplicaReport:
    return ReplicaReport(role="trainer", pool="tiny", replica=name, **fields)


def need_of(document, offered: capacity.PoolCapacity) -> dict[str, int]:
    demands = capacity.Demands()
    demands.update({"tiny": offered}, ())
    return {name: units for (_, name), units in demands.of(document).need.items()}


def test_limits_are_the_smallest_engines_and_agents_are_summed_over_the_replicas_that_serve():
    small = engine("r1", slots=4, max_rank=32, max_model_len=0, agents_per_slot=4)
    away = engine("r2", slots=2, max_rank=8, ready=False)
    reports = [engine("r0", agents_per_slot=4), small, away, trainer("t0")]
    assert capacity.capacities(reports) == {"tiny": capacity.PoolCapacity(4, 16, 512, agents=48)}


def test_a_cache_of_unknown_size_limits_nothing_and_the_smallest_trainer_must_be_able_to_take_all_agents():
    known = [engine("r0", kv_tokens=100, agents_per_slot=2), trainer("t0", agent_room_bytes=7, bytes_per_rank=1)]
    [offered] = capacity.capacities(known).values()
    assert offered.totals() == {capacity.SLOTS: 16, capacity.KV_CACHE: 200, capacity.TRAINER_MEMORY: 14}
    more = engine("r1"), trainer("t1"), trainer("t2", agent_room_bytes=4, bytes_per_rank=2)
    [offered] = capacity.capacities([*known, *more]).values()
    assert offered.totals() == {capacity.SLOTS: 24, capacity.TRAINER_MEMORY: 8}, "t1 does not tell its room"
    assert (offered.trainer_bytes, offered.bytes_per_rank) == (4, 2)


@pytest.mark.parametrize(("rank", "room", "bytes_per_rank", "units"), rows(__file__, "trainer_memory"))
def test_a_job_needs_trainer_memory_by_its_rank(document, rank, room, bytes_per_rank, units):
    """16 x 1 MiB of 1 GiB are 32 of 4,096 units, because two agents take turns."""
    offered = capacity.PoolCapacity(8, 16, agents=8, trainer_bytes=room, bytes_per_rank=bytes_per_rank)
    assert need_of(document(rank=rank), offered)[capacity.TRAINER_MEMORY] == units


@pytest.mark.parametrize(("kv_tokens", "tokens"), [(4000, 1024), (800, 800)])
def test_the_working_set_is_one_reply_for_each_episode_at_once_and_at_most_one_whole_cache(document, kv_tokens, tokens):
    """2 groups of 2 episodes, 256 tokens each; four agents take turns on a slot, so the cache counts four times."""
    offered = capacity.PoolCapacity(8, 16, agents=32, kv_tokens=kv_tokens, shared_kv_tokens=4 * kv_tokens)
    total = min(4 * kv_tokens, capacity.GRAIN)
    assert need_of(document(), offered)[capacity.KV_CACHE] == -(-tokens * total // (4 * kv_tokens))
    assert total >= 4 * need_of(document(), offered)[capacity.KV_CACHE] - 4


@relaxed
@given(
    held=st.lists(st.integers(1, 5), max_size=6),
    first=st.integers(1, 8),
    passing=st.integers(1, 8),
    total=st.integers(8, 12),
)
def test_whichever_jobs_end_one_that_does_not_delay_changes_nothing_for_the_first(held, first, passing, total):
    space = capacity.Space(
        {("tiny", capacity.SLOTS): total}, [demand(f"h{n}", "a", units) for n, units in enumerate(held)]
    )
    waits, other = demand("first", "a", first), demand("other", "b", passing)
    said = space.delays(other, waits)
    delayed = False
    for number in range(len(held) + 1):
        for ended in combinations(range(len(held)), number):
            used = sum(units for n, units in enumerate(held) if n not in ended)
            delayed = delayed or (used + first <= total) != (used + passing + first <= total)
    assert said == delayed
    assert not space.delays(demand("elsewhere", "a", 2, pool="other"), waits)
