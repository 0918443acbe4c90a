"""What is believed of an episode, and what fails its job instead."""

import ormsgpack
import pytest
from tests.harness import an_episode, changed, identity
from tests.tables import rows

from marlaas_api.bus import Stored
from marlaas_api.messages import Episode, FaultClass, PolicyRecord, TaskMessage
from marlaas_api.messages.job_spec import EvaluationSettings
from marlaas_api.names import Split, eval_group
from marlaas_api.wire import encode
from marlaas_worker.orchestrator import open_groups
from marlaas_worker.orchestrator.episodes import EpisodeInvalid, EpisodesTooLarge, read_episode
from marlaas_worker.orchestrator.evaluation import EvaluationRun
from marlaas_worker.orchestrator.job_state import JobHistory, JobState
from marlaas_worker.orchestrator.step_records import Around, EvaluationEnd, eval_record, step_record

HELD_OUT = {"split": Split.EVAL, "index": 1, "group": "uid-sums-e1v1", "episode": "uid-sums-e1v1-0-1", "member": 0}
LONG = [
    ({"rewards": {"policy": 0.5, "x" * 1000: 1.0}}, "not an agent of the job"),
    ({"prior_faults": (FaultClass.INFRA,) * 1000}, "after 1000 faults"),
    ({"leaves": {"policy": tuple(range(10_000))}}, "10000 conversations"),
    ({"fault": FaultClass.ENV, "fault_text": "x" * 100_000}, "100000 characters"),
    ({"choices": [{"agent": "policy", "turns": range(1000)}]}, "1000 candidates, some of them twice, or more than"),
]


@pytest.fixture
def stored():
    def pack(message: object) -> Stored:
        return Stored("episode.team-a.sums", 7, message if isinstance(message, bytes) else encode(message))

    return pack


@pytest.fixture
def episode(document):
    def make(**fields: object) -> Episode:
        played = an_episode(document(), 3, 1, rewards={"policy": 0.5}, leaves={"policy": (0,)})
        return Episode.model_validate({**played.model_dump(), **fields})

    return make


def test_an_episode_as_sandboxes_write_it_is_believed(document, episode, stored):
    failed = episode(rewards={}, leaves={}, fault=FaultClass.ENV, fault_text="it broke", duration_s=0.1)
    for one in (episode(), episode(**HELD_OUT), failed):
        assert read_episode(stored(one), document()) == one
    earlier = episode(uid="uid-earlier")
    assert read_episode(stored(earlier), document()) is None, "of an earlier job of this name"


@pytest.mark.parametrize(("fields", "words"), [*rows(__file__, "episodes"), *LONG])
def test_an_episode_that_no_sandbox_writes_is_named(document, episode, stored, fields, words):
    with pytest.raises(EpisodeInvalid, match=words) as error:
        read_episode(stored(episode(**fields)), document())
    assert "message 7 on episode.team-a.sums" in str(error.value)
    assert len(str(error.value)) < 500


def test_what_is_no_episode_is_refused_and_no_claim_is_followed(document, stored):
    claim = {"v": 1, "t": "Claim", "d": {"key": "team-b/secret/adapter", "sha256": "0" * 64, "size": 1}}
    task = TaskMessage(**identity(document()), group="g", split=Split.TRAIN, index=0, seed=0, group_size=1)
    headless = [ormsgpack.packb({"v": 1, "t": "Episode"}), ormsgpack.packb({"v": float("inf")})]
    for data in (b"", b'{"stream":"EPISODES","seq":1}', ormsgpack.packb(claim), encode(task), *headless):
        with pytest.raises(EpisodeInvalid, match="it is not an episode"):
            read_episode(stored(data), document())


def test_a_job_keeps_episodes_up_to_a_bound_until_their_step_or_evaluation_is_on_record(document, monkeypatch):
    """A sandbox that holds one member back could otherwise fill the memory of the orchestrator, which all jobs share."""
    monkeypatch.setattr(open_groups, "MAX_KEPT_BYTES", 1 << 20)
    job = document(groupsPerStep=1, maxStaleness=1)
    job = changed(job, rollout=job.spec.rollout.model_copy(update={"group_size": 67}))
    state = JobState(job, JobHistory(policies={"policy": PolicyRecord(uid=job.uid, version=0)}))
    state.apply(state.issuing(3, 0))
    large = an_episode(job, rewards={"policy": 0.5}, leaves={"policy": tuple(range(390))})

    def play(index: int, *members: int) -> None:
        for member in sorted(members * 2):  # Redelivered episodes are not kept twice.
            names = an_episode(job, index, member).model_dump(include={"group", "index", "member", "episode"})
            state.add_episode(large.model_copy(update=names))

    play(0, *range(67))
    state.apply(state.assembly.decision(state.groups.complete[0], {"policy": 0}))
    state.apply(step_record(job, state.assembly.drafts[0], {}, Around(0.0, 1.0)))
    run = EvaluationRun(0, 0, EvaluationSettings(tasks=100_000), {"policy": 0})
    state.apply(state.beginning(run, 0))
    measured = {f"metric {number}": 1.0 for number in range(390)}
    held_out = large.model_copy(update={"split": Split.EVAL, "metrics": measured, "fault": FaultClass.ENV})
    for index in range(16):
        state.add_episode(held_out.model_copy(update={"index": index, "group": eval_group(job.ref, index, 0)}))
    state.apply(eval_record(job, run, EvaluationEnd(1.0, (), {})))
    play(1, *range(67))
    with pytest.raises(EpisodesTooLarge, match="take 1 MiB, more than the 1 MiB that the orchestrator keeps"):
        play(2, 0)
