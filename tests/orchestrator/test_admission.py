"""Verdicts on waiting jobs: admitted, or queued with a reason; and which decisions last from round to round."""

import pytest

from marlaas_api.messages import JobDocument, Phase, Progress, TenantQuota
from marlaas_worker.orchestrator.admission import (
    RECONSIDER_S,
    Admission,
    AdmissionDecision,
    AdmissionQueue,
    AdmissionScene,
    TenantTerms,
)
from marlaas_worker.orchestrator.capacity import PoolCapacity
from marlaas_worker.orchestrator.preemption import MIN_RUN_S

POOL = {"tiny": PoolCapacity(slots=6, max_rank=16, max_model_len=2048, agents=3)}
LATER = 10 * MIN_RUN_S


def scene(waiting, holding=(), now: float = 0.0, **fields) -> AdmissionScene:
    return AdmissionScene(
        **{
            "waiting": list(waiting),
            "holding": list(holding),
            "since": [0.0] * len(holding),
            "pools": POOL,
            "now": now,
            **fields,
        }
    )


def one(document, holding=(), **fields) -> Admission:
    return AdmissionQueue().decide(scene([document], holding, **fields)).admissions[document.uid]


def of(document: JobDocument, tenant: str) -> JobDocument:
    uid = f"{tenant}-{document.job}"
    return document.model_copy(update={"namespace": f"{tenant}-1", "tenant": tenant, "uid": uid})


def several(document, number: int, tenant: str = "team-a") -> list[JobDocument]:
    return [of(document(f"j{n}", created_at=n), tenant) for n in range(number)]


def progress_of(document: JobDocument, **fields) -> Progress:
    known = {"phase": Phase.RUNNING, "admitted": True, "reason": "Training", "steps": 40, "step": 12}
    return Progress(namespace=document.namespace, job=document.job, uid=document.uid, **{**known, **fields})


def admitted(decision: AdmissionDecision) -> set[str]:
    return {uid for uid, verdict in decision.admissions.items() if verdict.admitted}


SIZE = {"agents": 3, "trainer_bytes": 15 << 20, "bytes_per_rank": 1 << 20}


@pytest.mark.parametrize(
    ("settings", "pools", "reason", "words"),
    [
        ({"rank": 32}, POOL, "WaitingForPool", "has adapter rank 32, and maxRank is 16 in a replica of pool tiny"),
        ({"maxStaleness": 5}, POOL, "WaitingForPool", "needs 7 adapter slots (maxStaleness + 2 for each agent), and"),
        (
            {},
            {"tiny": PoolCapacity(6, 16, 256, agents=3)},
            "WaitingForPool",
            "has maxTokens 256, and maxModelLen is 256",
        ),
        (
            {"rank": 16},
            {"tiny": PoolCapacity(6, 16, **SIZE)},
            "WaitingForPool",
            "needs 16 MiB of trainer memory for its",
        ),
        ({}, {}, "WaitingForPool", "no rollout replica of pool tiny is ready yet"),
        ({"suspend": True}, POOL, "Suspended", "spec.suspend is true"),
    ],
)
def test_what_a_job_cannot_do_on_the_replicas_that_serve_now_is_waited_for_with_both_numbers(
    document, settings, pools, reason, words
):
    verdict = one(document(**settings), pools=pools)
    assert (verdict.admitted, verdict.reason) == (False, reason)
    assert words in verdict.message


@pytest.mark.parametrize("longest", [0, 257])
def test_a_conversation_of_unknown_length_or_with_room_for_a_prompt_is_no_hindrance(document, longest):
    assert one(document(), pools={"tiny": PoolCapacity(6, 16, longest, agents=3)}).admitted


def test_agents_that_take_turns_outnumber_the_slots_and_the_next_job_is_queued(document):
    """It is queued also if the running jobs hold more than their pool has now."""
    for number in (3, 5):
        verdict = one(document("late"), several(document, number))
        assert (verdict.admitted, verdict.reason) == (False, "WaitingForSlots")
        assert "pool tiny admits 3 agents at once" in verdict.message


def test_a_neighbours_adapters_never_take_a_trainer_out_of_memory(document):
    pool = PoolCapacity(6, 16, agents=24, trainer_bytes=21 << 20, bytes_per_rank=1 << 20)
    early = [document(name, rank=16) for name in ("one", "two")]
    assert one(document("late", rank=8), early, pools={"tiny": pool}).admitted
    verdict = one(document("late", rank=16), early, pools={"tiny": pool})
    words = "running jobs use too much of the trainer memory of pool tiny"
    assert (verdict.reason, verdict.message) == ("WaitingForMemory", words)


def test_a_job_of_another_pool_or_one_that_cannot_run_gives_its_turn_to_nobody(document):
    early = [
        of(document("rests", created_at=1, suspend=True), "mine"),
        of(document("too-large", created_at=2, maxStaleness=9), "mine"),
        of(document("elsewhere", created_at=3), "mine").model_copy(update={"pool": "other"}),
    ]
    first, late = of(document("first", created_at=4), "other"), of(document("late", created_at=5, priority=9), "mine")
    pool = {"tiny": PoolCapacity(6, 16, agents=1)}
    assert admitted(AdmissionQueue().decide(scene([late, first, *early], pools=pool))) == {first.uid}


def test_an_unknown_tenant_has_weight_1_and_no_quota(document):
    weights = {"rich": TenantTerms(weight=2.0)}
    jobs = [*several(document, 3, "rich"), *several(document, 3, "unknown")]
    found = admitted(AdmissionQueue().decide(scene(jobs, tenants=weights)))
    assert found == {"rich-j0", "rich-j1", "unknown-j0"}


def test_a_job_over_quota_is_queued_with_both_numbers_and_the_job_that_it_waits_for(document):
    running, waits = several(document, 2)
    terms = {"team-a": TenantTerms(quota=TenantQuota(jobs=1))}
    verdict = one(waits, [running], tenants=terms, progress_of=lambda ref: progress_of(running))
    assert (verdict.admitted, verdict.reason) == (False, "OverQuota")
    assert verdict.message == "over quota: 1 of 1 jobs; waits for team-a-1/j0, 12 of 40 steps"


def test_a_quota_holds_within_one_round(document):
    jobs = several(document, 3)
    terms = {"team-a": TenantTerms(quota=TenantQuota(adapter_slots=2))}
    assert admitted(AdmissionQueue().decide(scene(jobs, tenants=terms))) == {jobs[0].uid, jobs[1].uid}


def test_the_place_of_a_preempted_job_is_kept_for_the_preemptor_until_the_victim_has_stopped(document):
    queue, holding = AdmissionQueue(), several(document, 3)
    new, other = of(document("new", created_at=99), "team-b"), of(document("x", created_at=1), "team-c")
    said = queue.decide(scene([new], holding, LATER)).preempted
    words = "preempted by tenant team-b (team-b-1/new), whose share is smaller; it resumes where it stopped when there is room"
    assert said == {"team-a-j2": words}
    during = queue.decide(scene([new, other], holding[:2], LATER, pools={"tiny": PoolCapacity(6, 16, agents=3)}))
    assert admitted(during) == {new.uid}
    again = AdmissionQueue()
    again.decide(scene([new], holding, LATER))
    assert again.decide(scene([new], holding, LATER + RECONSIDER_S)).preempted == said, "and nothing more"


def test_a_free_place_is_kept_for_the_preemptor_that_needs_it_beside_those_of_its_victims(document):
    queue, holding, pools = AdmissionQueue(), several(document, 3), {"tiny": PoolCapacity(6, 16, agents=4)}
    new = of(document("new", agents=[{"name": "a"}, {"name": "b"}], created_at=99), "team-b")
    assert queue.decide(scene([new], holding, LATER, pools=pools)).preempted.keys() == {"team-a-j2"}
    other = of(document("x", created_at=1), "team-c")
    assert admitted(queue.decide(scene([new, other], holding, LATER, pools=pools))) == set()
    assert admitted(queue.decide(scene([new, other], holding[:2], LATER, pools=pools))) == {new.uid}


@pytest.mark.parametrize("during", [1, 2], ids=["it was smaller", "it becomes smaller meanwhile"])
def test_a_smaller_pool_displaces_nobody_and_the_preemptor_has_the_place_of_its_victim(document, during):
    """One of two replicas restarts while six jobs run on them."""
    whole, half = ({"tiny": PoolCapacity(6, 16, agents=number)} for number in (6, 3))
    queue, holding = AdmissionQueue(), several(document, 6)
    new, other = of(document("new", created_at=99), "team-b"), of(document("x", created_at=100), "team-a")
    first = queue.decide(scene([new, other], holding, LATER, pools=half if during == 1 else whole))
    assert first.preempted.keys() == {"team-a-j5"}
    stopped = queue.decide(scene([new, other, holding[5]], holding[:5], LATER + 1, pools=half))
    assert (admitted(stopped), stopped.preempted) == ({new.uid}, {})
    later = queue.decide(scene([other, holding[5]], [*holding[:5], new], 2 * LATER, pools=half))
    assert (admitted(later), later.preempted) == (set(), {})


def test_an_entry_is_charged_and_refunded_when_the_job_is_preempted(document):
    queue, [job] = AdmissionQueue(), several(document, 1)
    queue.decide(scene([job]))
    queue.entered(job)
    assert queue.past.of("team-a") == pytest.approx(60 / 3)
    queue.left(job)
    assert queue.past.of("team-a") == 0.0


def test_a_job_that_makes_room_is_not_charged_for_the_time_that_it_needs_to_stop(document):
    queue, holding, new = AdmissionQueue(), several(document, 3), of(document("new"), "team-b")
    queue.advance(LATER)
    queue.decide(scene([new], holding, LATER))
    queue.advance(LATER + 3.0)
    assert queue.past.of("team-a") == pytest.approx(3.0 * 2 / 3, rel=0.01)
    assert queue.decide(scene([], holding, LATER)).preempted == {}, "victims go on when nobody needs their place"
