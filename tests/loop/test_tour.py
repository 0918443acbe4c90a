"""One real run (`tour`) as a person sees it: a job learns, kills lose and double nothing, and every command finds what it shows."""

import hashlib

import numpy as np
import psutil
import pytest
from tests.loop import tour as played
from tests.loop.tour import ADDED, CANCELLED, HELD_OUT, LEARNING, SEVERAL_TURNS, STEPS, TEAM

from marlaas import Run
from marlaas.episodes.files import read_all
from marlaas.episodes.usage import usage_of
from marlaas.local.records import open_jobs
from marlaas_api.names import Split

pytestmark = [pytest.mark.engine, pytest.mark.processes, pytest.mark.slow, pytest.mark.timeout(1800)]
ENDED = (LEARNING, SEVERAL_TURNS, TEAM, ADDED)


@pytest.fixture(scope="session")
def tour(tiny_model, tmp_path_factory):
    return played.play(tmp_path_factory.mktemp("tour"))


def test_stopped_by_ctrl_c_killed_and_changed_the_same_command_ends_it_well(tour):
    assert tour.code == 130, tour.lines[-3:]
    phases = {name: job["phase"] for name, job in tour.summary.items()}
    assert phases == dict.fromkeys(ENDED, "Succeeded")
    said = [note for note in tour.notes() if "killed by SIGKILL; it restarts" in note]
    for name in ("sandbox-0 (team-a/exact)", "orchestrator", "trainer-0 (exact)", "rollout-0 (exact)"):
        assert any(note.startswith(name) for note in said), said
    assert tour.said["suspend"] == "team-a/reverse: suspended\n"
    assert tour.said["resume"] == "team-a/reverse: resumed\n"
    assert tour.said["submit"].endswith("team-c/added: added\n")
    assert tour.said["cancel"].startswith("team-a/cancelled: cancelled")
    assert "suspended" in tour.said["why"]
    assert (tour.out / CANCELLED).is_dir()


def test_a_job_learns(tour):
    job = tour.summary[LEARNING]
    assert job["evalBefore"] <= 0.45
    assert job["evalAfter"] >= job["evalBefore"] + 0.3


@pytest.mark.parametrize("name", [LEARNING, SEVERAL_TURNS])
def test_a_job_trains_what_it_sampled_and_everything_a_person_looks_for_is_there(tour, name):
    job, first, folder = tour.summary[name], tour.steps(name)[0], tour.out / name
    assert job["steps"] == STEPS[name.rpartition("/")[2]]
    assert (first["staleness_max"], first["metrics"]["logprob_gap"] <= 1e-4) == (0, True)
    assert (folder / "curve.png").read_bytes().startswith(b"\x89PNG")
    files = {path.name for path in (folder / "adapter").iterdir()}
    assert files >= {"adapter_model.safetensors", "adapter_config.json"}
    assert len(list((folder / "logs").iterdir())) >= 4


def test_python_follows_the_run_and_reads_what_it_left(tour):
    run, steps = Run(tour.out), STEPS["reverse"]
    assert tour.followed == list(range(steps))
    assert (set(run.jobs()), run.is_running, run.wait()) == ({*ENDED}, False, tour.summary)
    assert [one.version for one in run.evaluations("reverse")] == [0, steps]
    assert (run.adapter("reverse") / "adapter_config.json").is_file()
    assert {episode.split for episode in run.episodes("reverse")} == {"train", "eval"}
    assert [row["metrics/updates"] for row in run.rows("reverse")] == [1.0] * steps


@pytest.mark.parametrize("name", ENDED)
def test_every_task_is_in_one_step_and_every_step_in_one_record(tour, name):
    steps = tour.steps(name)
    assert [step["step"] for step in steps] == list(range(tour.summary[name]["steps"]))
    indices = [index for step in steps for index in step["indices"]]
    assert sorted(indices) == list(range(len(indices)))
    assert [step["version"] for step in steps] == sorted(step["version"] for step in steps)


def test_the_team_makes_the_adapters_that_it_makes_undisturbed(tour, undisturbed):
    expected = undisturbed["exact"]
    for agent, versions in expected.weights.items():
        weights = (tour.out / TEAM / "adapter" / agent / "adapter_model.safetensors").read_bytes()
        assert hashlib.sha256(weights).hexdigest() == versions[-1]
    for step, record in zip(expected.steps, tour.steps(TEAM), strict=True):
        assert (record["indices"], record["reward_mean"]) == ([*step.indices], step.reward_mean)
        trained = {name: used["trained_tokens"] for name, used in record["usage"].items()}
        assert trained == {name: used.trained_tokens for name, used in step.usage.items()}


def test_every_recorded_token_is_in_an_episode_and_in_the_usage(tour):
    for one in open_jobs(tour.out):
        used = usage_of(one.document, read_all(one.folder), one.steps(), one.progress).amounts
        assert 0 < used.trained_tokens <= used.generated_tokens < used.prompt_tokens
        assert used.evaluation_tokens > 0
        steps = [agent for step in one.steps() for agent in step.usage.values()]
        assert one.progress.amounts.trained_tokens == used.trained_tokens == sum(part.trained_tokens for part in steps)
        assert one.progress.faults == {}, "kills are none"


def test_nothing_is_left_running_and_no_temporary_file(tour):
    lines = [" ".join(one.info["cmdline"] or []) for one in psutil.process_iter(["cmdline"])]
    assert not [line for line in lines if str(tour.out) in line]
    assert list(tour.temporary.iterdir()) == []


def peft_logprobs(model, adapter, turns):
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    if adapter is not None:
        policy = PeftModel.from_pretrained(policy, str(adapter)).eval()
    rows = []
    for turn in turns:
        tokens = torch.tensor([[*turn.prompt_ids, *turn.output_ids]])
        with torch.no_grad():
            logprobs = policy(tokens).logits[0, :-1].log_softmax(-1)
        rows.append(logprobs.gather(-1, tokens[0, 1:, None])[len(turn.prompt_ids) - 1 :, 0].numpy())
    return np.concatenate(rows)


def test_the_adapter_is_a_plain_peft_folder_of_the_policy_that_vllm_sampled(tour, tiny_model):
    """The replies to held-out tasks, after the last step. Without the adapter, they have other logprobs."""
    episodes = [one for one in read_all(tour.out / LEARNING) if one.split is Split.EVAL]
    turns = [one.turns[0] for one in episodes if one.turns[0].version == STEPS["reverse"]]
    assert len(turns) == HELD_OUT["reverse"]
    sampled = np.concatenate([turn.logprobs for turn in turns[:24]])
    in_peft, without = (peft_logprobs(tiny_model, path, turns[:24]) for path in (tour.out / LEARNING / "adapter", None))
    assert np.abs(in_peft - sampled).max() < 1e-3
    assert np.abs(without - sampled).max() > 0.1
