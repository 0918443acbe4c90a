from dataclasses import replace

import pytest
from tests.tables import rows

from marlaas.local import plan
from marlaas.local.processes import visible_cards
from marlaas_api.documents import pool_spec
from marlaas_api.kinds import ModelPoolSpec
from marlaas_api.messages import Phase, PoolDocument, ReplicaReport


def _pool(name="tiny", rollout=1, trainer=1):
    body = {"model": {"builtin": "tiny"}, "rollout": {"replicas": rollout}, "trainer": {"replicas": trainer}}
    return PoolDocument(name=name, model_path="/m", spec=pool_spec(ModelPoolSpec.model_validate(body)))


def test_each_worker_of_a_machine_with_several_gpus_sees_one_in_turn(tmp_path):
    for name in ("nvidia0", "nvidia10", "nvidia2", "nvidiactl"):
        (tmp_path / name).touch()
    cards = visible_cards({}, tmp_path)
    assert cards == ["0", "2", "10"]
    assert list(plan.cards_by_worker([_pool(rollout=3), _pool("big")], cards).values()) == [*cards, *cards]
    assert plan.cards_by_worker([_pool()], visible_cards({"CUDA_VISIBLE_DEVICES": "GPU-a,"}, tmp_path)) == {}


def _keys(specs):
    return [spec.key for spec in specs]


def _by_key(*all_progress):
    return {progress_of.ref.key: progress_of for progress_of in all_progress}


def test_pool_and_orchestrator_run_before_anything_is_admitted_and_then_the_sandboxes_too(document, progress_of):
    job = document(spec={"environment": {"name": "reverse", "replicas": 2}})
    workers = ["orchestrator", "rollout-0.tiny", "rollout-1.tiny", "trainer-0.tiny"]
    assert _keys(plan.desired([_pool(rollout=2)], [job], {})) == workers
    sandboxes = ["sandbox-0.team-a.reverse", "sandbox-1.team-a.reverse"]
    assert _keys(plan.desired([_pool(rollout=2)], [job], _by_key(progress_of(job)))) == [*workers, *sandboxes]


@pytest.mark.parametrize(
    ("phase", "admitted"), [(Phase.QUEUED, False), (Phase.SUSPENDED, False), (Phase.SUCCEEDED, True)]
)
def test_a_job_that_is_not_admitted_or_has_ended_has_none_while_another_goes_on(document, progress_of, phase, admitted):
    other = document("other")
    all_progress = _by_key(progress_of(document(), phase=phase, admitted=admitted), progress_of(other))
    assert _keys(plan.desired([_pool()], [document(), other], all_progress))[3:] == ["sandbox-0.team-a.other"]


def test_nothing_runs_once_every_job_is_settled_and_no_pool_that_no_running_job_uses(document, progress_of):
    stale = progress_of(document(uid="earlier"), phase=Phase.SUCCEEDED)  # of an earlier job of the same name
    keys = _keys(plan.desired([_pool()], [document()], _by_key(stale)))
    assert keys == ["orchestrator", "rollout-0.tiny", "trainer-0.tiny"]
    big, ended = document("other", pool="big"), progress_of(document(), phase=Phase.FAILED)
    pools = [_pool(), _pool("big")]
    keys = _keys(plan.desired(pools, [document(), big], _by_key(ended)))
    assert keys == ["orchestrator", "rollout-0.big", "trainer-0.big"]
    all_ended = _by_key(ended, progress_of(big, phase=Phase.SUCCEEDED))
    assert plan.desired(pools, [document(), big], all_ended) == ()


def test_the_pools_of_all_agents_run_and_a_pool_without_an_agent_does_not(document, progress_of):
    agents = [{"name": "a"}, {"name": "b", "poolRef": {"name": "big"}}]
    team = document(spec={"agents": agents})
    pools = [_pool(), _pool("big"), _pool("other")]
    workers = ["rollout-0.tiny", "trainer-0.tiny", "rollout-0.big", "trainer-0.big"]
    keys = _keys(plan.desired(pools, [team], _by_key(progress_of(team))))
    assert keys == ["orchestrator", *workers, "sandbox-0.team-a.reverse"]
    lone = document(spec={"agents": agents[1:]})
    assert _keys(plan.desired(pools, [lone], {})) == ["orchestrator", *workers[2:]]
    assert plan.affected(plan.ProcessSpec("trainer", "trainer-0", pool="big"), [team, document("other")]) == [team]


@pytest.mark.parametrize(("phase", "step", "expected"), rows(__file__, "unsettled"))
def test_a_newer_document_unsettles_a_job_only_if_there_is_more_to_do(document, progress_of, phase, step, expected):
    newer = document(spec={"training": {"steps": 5}}, generation=2)
    assert plan.settled(newer, progress_of(document(), phase=phase, step=step)) is expected
    suspended = document(spec={"suspend": True})
    assert plan.settled(suspended, progress_of(suspended, phase=Phase.SUSPENDED))


def test_a_process_affects_the_jobs_of_its_pool_or_its_own(document):
    jobs = [document(), document("other", pool="big")]
    assert plan.affected(plan.ProcessSpec("rollout", "rollout-0", pool="big"), jobs) == jobs[1:]
    assert plan.affected(plan.ProcessSpec("sandbox", "sandbox-0", job="team-a.reverse"), jobs) == jobs[:1]
    assert plan.affected(plan.ProcessSpec("orchestrator", "orchestrator"), jobs) == jobs
    keys = {plan.ProcessSpec("trainer", "trainer-0", pool=pool).key for pool in ("a", "b")}
    assert len(keys) == 2, "two pools' replicas of one name have logs of their own"


@pytest.mark.parametrize(("fields", "expected"), rows(__file__, "reports"))
def test_a_pool_worker_is_ready_when_its_own_report_says_so_since_it_started(fields, expected):
    body = {"role": "rollout", "pool": "tiny", "replica": "rollout-0", "at": 50.0}
    report = ReplicaReport.model_validate({**body, **fields})
    assert plan.is_ready(plan.ProcessSpec("rollout", "rollout-0", pool="tiny"), 40.0, [report], 60.0) is expected


def test_a_process_without_reports_is_ready_when_it_has_lived_for_a_moment():
    sandbox = plan.ProcessSpec("sandbox", "sandbox-0", job="team-a.reverse")
    assert [plan.is_ready(sandbox, 40.0, [], now) for now in (41.0, 43.0)] == [False, True]


NEVER_READY = plan.ProcessRun(ended_at=50.0, ready_at=None, exit_code=1)
KILLED_EARLY = plan.ProcessRun(ended_at=50.0, ready_at=None, exit_code=-9)
SHORT = plan.ProcessRun(ended_at=51.0, ready_at=50.0, exit_code=1)
GOOD = plan.ProcessRun(ended_at=50.0 + plan.MIN_READY_S, ready_at=50.0, exit_code=-9)


def _all(*runs: plan.ProcessRun):
    backoff = plan.RestartBackoff()
    for run in runs:
        backoff = plan.after(backoff, run)
    return backoff


def test_the_wait_doubles_with_every_exit_in_a_row_is_bounded_and_starts_anew_after_a_good_run():
    assert [_all(*[SHORT] * n).delay_s for n in (1, 2, 3, 4)] == [1, 2, 4, 8]
    assert _all(*[SHORT] * 7).delay_s == 30
    assert _all(SHORT, SHORT, GOOD) == plan.RestartBackoff()
    assert _all(replace(GOOD, exit_code=plan.EXIT_INVALID)) == plan.RestartBackoff()
    assert plan.RestartBackoff().delay_s == 0


@pytest.mark.parametrize(("runs", "gives_up"), rows(__file__, "given_up"))
def test_what_exits_again_and_again_is_given_up(runs, gives_up):
    invalid = {at: plan.ProcessRun(ended_at=51.0, ready_at=at, exit_code=plan.EXIT_INVALID) for at in (None, 50.0)}
    kinds = {"N": NEVER_READY, "K": KILLED_EARLY, "S": SHORT, "G": GOOD, "I": invalid[None], "R": invalid[50.0]}
    assert (plan.MAX_NEVER_READY, plan.MAX_SHORT) == (3, 8)
    assert _all(*map(kinds.__getitem__, runs)).gives_up is gives_up
