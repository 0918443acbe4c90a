"""What a person sees of one real run (`tour`): the jobs learn, nothing is lost or doubled by kills, and everything looked for is there."""

import hashlib
import math
import random
from pathlib import Path

import numpy as np
import psutil
import pytest
from tests.loop import tour as played
from tests.loop.harness import Ended
from tests.loop.tour import ADDED, CANCELLED, LEARNING, STEPS, TEAM, VICTIMS, Tour

from marlaas.episodes.files import read_all
from marlaas.episodes.usage import usage_of
from marlaas.local.records import open_jobs
from marlaas_api.names import Split

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(1800)]


@pytest.fixture(scope="session")
def tour(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Tour:
    """One real run of vLLM and all other processes, stopped once and continued."""
    return played.play(tmp_path_factory.mktemp("tour"))


def test_it_is_stopped_by_ctrl_c_and_the_same_command_ends_it_well(tour: Tour) -> None:
    assert tour.codes == [130, 0], tour.lines[-3:]
    assert {name: job["phase"] for name, job in tour.summary.items()} == dict.fromkeys(
        (*LEARNING, TEAM, ADDED), "Succeeded"
    )


@pytest.mark.parametrize("name", LEARNING)
def test_a_job_learns(tour: Tour, name: str) -> None:
    job = tour.summary[name]
    assert job["steps"] == STEPS[name.rpartition("/")[2]]
    assert job["evalBefore"] <= 0.45
    assert job["evalAfter"] >= job["evalBefore"] + 0.2


@pytest.mark.parametrize("name", [*LEARNING, TEAM, ADDED])
def test_every_task_is_in_one_step_and_every_step_in_one_record(tour: Tour, name: str) -> None:
    """Whatever was killed, suspended and stopped in between."""
    steps = tour.steps(name)
    assert [step["step"] for step in steps] == list(range(tour.summary[name]["steps"]))
    indices = [index for step in steps for index in step["indices"]]
    assert sorted(indices) == list(range(len(indices)))
    assert [step["version"] for step in steps] == sorted(step["version"] for step in steps)


def test_the_team_makes_the_adapters_that_it_makes_undisturbed(tour: Tour, undisturbed: dict[str, Ended]) -> None:
    """In one process, to which nothing happens, and beside other jobs."""
    expected = undisturbed["exact"]
    for agent, versions in expected.weights.items():
        weights = (tour.out / TEAM / "adapter" / agent / "adapter_model.safetensors").read_bytes()
        assert hashlib.sha256(weights).hexdigest() == versions[-1]
    for step, record in zip(expected.steps, tour.steps(TEAM), strict=True):
        assert (record["indices"], record["reward_mean"]) == ([*step.indices], step.reward_mean)
        trained = {name: used["trained_tokens"] for name, used in record["usage"].items()}
        assert trained == {name: used.trained_tokens for name, used in step.usage.items()}


def test_killed_roles_are_restarted(tour: Tour) -> None:
    notes = "\n".join(tour.notes())
    for victim in VICTIMS:
        name = victim.replace(".", " (") + ")" if "." in victim else victim
        if victim != "nats-server":
            assert f"{name}" in notes
    assert notes.count("killed by SIGKILL; it restarts") >= len(VICTIMS) - 1


def test_a_job_is_suspended_and_resumed_one_is_added_and_one_cancelled(tour: Tour) -> None:
    assert tour.said["suspend"] == "team-a/reverse: suspended\n"
    assert tour.said["resume"] == "team-a/reverse: resumed\n"
    assert tour.said["submit"].endswith("team-c/added: added\n")
    assert tour.said["cancel"].startswith("team-a/cancelled: cancelled")
    assert "suspended" in tour.said["why"]
    assert CANCELLED not in tour.summary
    assert (tour.out / CANCELLED).is_dir()


@pytest.mark.parametrize("name", LEARNING)
def test_what_sampled_is_what_trained_at_version_0(tour: Tour, name: str) -> None:
    first = tour.steps(name)[0]
    assert first["staleness_max"] == 0
    assert first["metrics"]["logprob_gap"] <= 1e-4


@pytest.mark.parametrize("name", LEARNING)
def test_everything_a_person_looks_for_is_there(tour: Tour, name: str) -> None:
    folder = tour.out / name
    assert (folder / "curve.png").read_bytes().startswith(b"\x89PNG")
    files = {path.name for path in (folder / "adapter").iterdir()}
    assert files >= {"adapter_model.safetensors", "adapter_config.json"}
    assert len(list((folder / "logs").iterdir())) >= 4


def test_every_recorded_token_is_in_an_episode_and_in_the_usage(tour: Tour) -> None:
    for one in open_jobs(tour.out):
        used = usage_of(one.document, read_all(one.folder), one.steps(), one.progress).amounts
        assert one.progress is not None
        assert 0 < used.trained_tokens <= used.generated_tokens < used.prompt_tokens
        assert used.evaluation_tokens > 0
        steps = [agent for step in one.steps() for agent in step.usage.values()]
        assert one.progress.amounts.trained_tokens == used.trained_tokens == sum(part.trained_tokens for part in steps)
        assert one.progress.faults == {}, "kills are none"


def test_nothing_is_left_running_and_no_temporary_file(tour: Tour) -> None:
    lines = [" ".join(one.info["cmdline"] or []) for one in psutil.process_iter(["cmdline"])]
    assert not [line for line in lines if str(tour.out) in line]
    assert list(tour.temporary.iterdir()) == []


# the adapter elsewhere ------------------------------------------------------------------------------------------------


def right_answers(model: Path, number: int = 24) -> list[tuple[np.ndarray, int]]:
    """Conversations with the right reply: token ids [T], and how many of them are the prompt."""
    from transformers import AutoTokenizer

    tokenizer, rng = AutoTokenizer.from_pretrained(model), random.Random(0)
    found = []
    for _ in range(number):
        word = "".join(rng.choice("abcdefghijklmnopqrstuvwxyz") for _ in range(rng.randint(3, 5)))
        messages = [{"role": "user", "content": f"reverse: {word}"}]
        prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        ids = tokenizer(prompt + word[::-1] + tokenizer.eos_token, add_special_tokens=False)["input_ids"]
        length = len(tokenizer(prompt, add_special_tokens=False)["input_ids"])
        found.append((np.array(ids, dtype=np.int64), length))
    return found


def peft_logprobs(model: Path, adapter: Path | None, cases: list[tuple[np.ndarray, int]]) -> list[np.ndarray]:
    """Logprobs of the replies, in transformers and peft."""
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    if adapter is not None:
        policy = PeftModel.from_pretrained(policy, str(adapter)).eval()
    rows = []
    for ids, length in cases:
        tokens = torch.from_numpy(ids)
        with torch.no_grad():
            logits = policy(tokens[None]).logits[0, :-1]
        rows.append(logits.log_softmax(-1).gather(-1, tokens[1:, None])[length - 1 :, 0].numpy())
    return rows


def test_the_adapter_is_a_plain_peft_folder_that_shows_the_behaviour_and_what_vllm_sampled(
    tour: Tour, tiny_model: Path
) -> None:
    adapter, cases = tour.out / LEARNING[0] / "adapter", right_answers(tiny_model)
    before, after = (
        sum(math.exp(float(row.sum())) for row in peft_logprobs(tiny_model, folder, cases)) / len(cases)
        for folder in (None, adapter)
    )
    assert after >= before + 0.2
    last = STEPS["reverse"]
    (*_, episodes) = [
        [one for one in read_all(tour.out / LEARNING[0]) if one.split is Split.EVAL and one.turns[0].version == last]
    ]
    turns = [one.turns[0] for one in episodes[:24]]
    sampled = [(np.array([*turn.prompt_ids, *turn.output_ids]), len(turn.prompt_ids)) for turn in turns]
    for turn, row in zip(turns, peft_logprobs(tiny_model, adapter, sampled), strict=True):
        np.testing.assert_allclose(turn.logprobs, row, atol=1e-3)
