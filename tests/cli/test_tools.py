"""`marlaas episodes`, `plot`, `usage`, `chat` and `why JOB --run DIR` on a folder as a run leaves it."""

import json
import re
import time

import pytest
from tests.cli.conftest import invoke
from tests.harness import a_progress, job_document
from tests.tables import rows

from marlaas.episodes.files import EpisodeWriter
from marlaas.episodes.record import EpisodeRecord, TurnRecord
from marlaas.local.folder import OutFolder, RunRecord, hold
from marlaas.models import prepare
from marlaas_api.documents import pool_spec
from marlaas_api.errors import InvalidInput
from marlaas_api.kinds import ModelPoolSpec
from marlaas_api.messages import AgentProgress, Phase, PoolDocument, Progress, StopReason, UsageAmounts
from marlaas_api.names import JobRef, Split, train_group

STEPS = {"training": {"steps": 40}}
JOB = job_document("sums", created_at=1000.0, spec=STEPS)
OTHER = job_document("other", created_at=1000.0, spec=STEPS)
REF = JobRef("a", "one", "u1")


def leave(out, *progress: Progress, jobs=None, model_path="/m"):
    spec = pool_spec(ModelPoolSpec.model_validate({"model": {"builtin": "tiny"}}))
    pool = PoolDocument(name="tiny", model_path=model_path, spec=spec)
    with hold(out) as folder:
        folder.write_record(RunRecord(jobs=tuple(jobs or (JOB, OTHER)), pools=(pool,), progress=progress))
        return folder


def write_run(root, model_path="/m", agents=()):
    spec = {"agents": list(agents)} if agents else {}
    job = job_document("one", uid="u1", namespace="a", tenant="a", spec=spec)
    return leave(root, jobs=[job], model_path=model_path).job(REF)


@pytest.fixture
def out(tmp_path):
    """Job `a/one` with three episodes of rewards 0, 1 and 0.5. The first episode has one turn of six tokens."""
    group = train_group(REF, 0)
    body = {"group": group, "split": Split.TRAIN, "index": 0}
    ids = {"output_ids": tuple(range(6)), "num_prompt_tokens": 9, "num_cached_tokens": 4}
    turn = TurnRecord(agent="policy", turn=0, version=0, append="", text="", stop_reason=StopReason.STOP, **ids)
    writer = EpisodeWriter(write_run(tmp_path / "out"))
    for member, reward in enumerate((0.0, 1.0, 0.5)):
        played = {"episode": f"{group}-{member}-1", "member": member, "rewards": {"policy": reward}}
        writer.append([EpisodeRecord(**body, **played, turns=(turn,) * (not member))])
    return tmp_path / "out"


def save_adapter(folder, *, changes_replies=False):
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(prepare("tiny"), dtype=torch.float32)
    torch.manual_seed(0)
    config = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=not changes_replies)
    get_peft_model(base, config).save_pretrained(folder)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    root = tmp_path_factory.mktemp("runs") / "out"
    save_adapter(write_run(root, str(prepare("tiny"))) / "adapter")
    return root


@pytest.fixture(scope="module")
def team(tmp_path_factory):
    """A run of three agents: `solver` and `second` play a policy whose adapter changes nothing, and critic's changes all replies."""
    root = tmp_path_factory.mktemp("teams") / "out"
    agents = [{"name": "solver"}, {"name": "critic"}, {"name": "second", "policy": {"of": "solver"}}]
    adapters = write_run(root, str(prepare("tiny")), agents) / "adapter"
    save_adapter(adapters / "solver")
    save_adapter(adapters / "critic", changes_replies=True)
    return root


def test_episodes_come_in_the_order_that_is_asked_for_and_nothing_to_show_is_said(out):
    for option, members in (("--worst", [0, 2, 1]), ("--best", [1, 2, 0]), ("--random", [0, 1, 2]), ("--faults", [])):
        result = invoke("episodes", str(out), option, "--json")
        found = [json.loads(line)["member"] for line in result.stdout.splitlines()]
        assert (result.exit_code, sorted(found) if option == "--random" else found) == (0, members)
    said = invoke("episodes", str(out), "--best", "-n", "1").stdout
    assert (said.count("member"), "a/one" in said, "reward 1" in said) == (1, True, True)
    assert "No episode of step 7 matches." in invoke("episodes", str(out), "--step", "7").stdout
    (out / "a" / "one" / "episodes.jsonl").unlink()
    assert "No episodes are recorded" in invoke("episodes", str(out)).stdout


def test_the_picture_lies_in_the_folder_unless_told_otherwise(out, tmp_path):
    result = invoke("plot", str(out))
    assert (result.exit_code, result.stdout) == (0, f"{out / 'plot.png'}\n")
    assert (out / "plot.png").read_bytes().startswith(b"\x89PNG")
    write_run(tmp_path / "y")
    assert invoke("plot", str(out), str(tmp_path / "y"), "--out", str(tmp_path / "both.html")).exit_code == 0
    text = (tmp_path / "both.html").read_text()
    assert "out: a/one" in text, "several runs are told apart by their folders"
    assert "y: a/one" in text


def test_usage_is_a_table_csv_or_json(out):
    found = invoke("usage", str(out)).stdout.splitlines()
    assert [line.split()[0] for line in found] == ["TENANT", "a", "a/one"]
    header, line = invoke("usage", str(out), "--csv").stdout.splitlines()
    assert header.startswith("tenant,namespace,job,prompt_tokens,cached_tokens,generated_tokens,trained_tokens")
    assert line.startswith("a,a,one,9,4,6,0")
    assert header.count(",") == line.count(",")
    told = json.loads(invoke("usage", str(out), "--job", "one", "--json").stdout)
    assert (told["open_tokens"], told["wasted_tokens"], told["generated_tokens"]) == (6, 0, 6)
    result = invoke("usage", str(out), "--json", "--csv")
    assert isinstance(result.exception, InvalidInput)
    assert "choose one" in str(result.exception)


def test_both_sides_answer_what_is_asked_by_option_or_from_a_pipe(trained):
    options = ("--greedy", "--max-tokens", "8", "-p", "reverse: hello", "-p", "again", "--json")
    result = invoke("chat", str(trained), *options)
    assert result.exit_code == 0, result.output
    first, second = (json.loads(line) for line in result.stdout.splitlines())
    assert first == {"prompt": "reverse: hello", "base": first["adapter"], "adapter": first["adapter"]}
    assert first["base"]
    assert second["prompt"] == "again"
    typed = "reverse: hello\n\n/new\nreverse: hello\n"
    result = invoke("chat", str(trained), *options[:3], typed=typed)
    assert result.exit_code == 0, result.output
    assert result.stdout.count("you: reverse: hello") == 2
    heading = next(line for line in result.stdout.splitlines() if "trained" in line)
    assert heading.split() == ["tiny", "a/one,", "trained"]
    answers = [line for line in result.stdout.splitlines() if line.startswith("olle")]
    assert len(set(answers)) <= 1


@pytest.mark.parametrize(("agent", "is_changed"), [("solver", False), ("second", False), ("critic", True)])
def test_of_several_agents_the_one_that_is_asked_for_answers(team, agent, is_changed):
    options = ("--agent", agent, "--greedy", "--max-tokens", "8", "-p", "reverse: hello", "--json")
    result = invoke("chat", str(team), *options)
    assert result.exit_code == 0, result.output
    told = json.loads(result.stdout)
    assert (told["adapter"] != told["base"]) is is_changed


@pytest.mark.parametrize(("options", "words"), rows(__file__, "chosen"))
def test_an_agent_of_several_is_chosen_by_name(team, options, words):
    with pytest.raises(InvalidInput, match=words):
        raise invoke("chat", str(team), *options, "-p", "x").exception


@pytest.mark.parametrize(("arguments", "words"), rows(__file__, "refused"))
def test_what_cannot_be_is_refused_before_anything_is_read_or_loaded(out, arguments, words):
    with pytest.raises(InvalidInput, match=words):
        raise invoke(*arguments.format(out=out).split()).exception


def why(tmp_path, *words: str):
    result = invoke("why", *(words or ("sums",)), "--run", str(tmp_path))
    if result.exception is not None:
        raise result.exception
    return " ".join(result.stdout.split())


def test_a_job_is_told_as_it_was_left_running_or_preempted(tmp_path):
    agents = {"policy": AgentProgress(reward=0.5)}
    leave(
        tmp_path, a_progress(JOB, reason="Training", step=10, reward=0.5, started_at=1000.0, at=1060.0, agents=agents)
    )
    assert why(tmp_path) == (
        f"No `marlaas run` uses {tmp_path} now. To continue the run, repeat the command that started it. As it was left: team-a/sums has been running for 1 m 00 s, at step 10 "
        "of 40, reward 0.50. Training: Episodes are played and trained on. There is nothing to do."
    )
    waits = {"phase": Phase.QUEUED, "admitted": False, "reason": "Preempted", "message": "preempted by tenant b"}
    other = a_progress(OTHER, reason="Training", step=10, started_at=1000.0, admitted_s=50.0, at=1080.0)
    leave(tmp_path, a_progress(JOB, **waits, step=3, started_at=1000.0, at=1060.0, steps=40), other)
    said = why(tmp_path)
    assert "team-a/sums has been queued for 0 s, at step 3 of 40. Preempted: The job made room" in said
    assert "the next running job to end is team-a/other, in about 2 m 30 s. There is nothing to do." in said


@pytest.mark.parametrize("reason", ["WaitingForPool", "WaitingForTrainer", "Training"])
def test_a_job_says_for_how_long_it_waits_and_the_advice_is_about_the_run(tmp_path, reason):
    leave(tmp_path, a_progress(JOB, reason=reason, reason_at=1018.0, admitted_at=1000.0, started_at=1000.0, at=1060.0))
    said = why(tmp_path)
    assert "has been running for 1 m 00 s" in said
    assert (f"{reason} (for 42 s): " in said) is (reason != "Training")
    leave(tmp_path, a_progress(JOB, phase=Phase.QUEUED, admitted=False, reason="WaitingForPool", at=1060.0))
    said = why(tmp_path, "sums", "-n", "team-a")
    assert "team-a/sums has been queued for 1 m 00 s. WaitingForPool: " in said, "since its creation"
    assert said.endswith(f"What to do: Wait while it starts. If it lasts, read the logs in {tmp_path}/.state/logs.")


@pytest.mark.parametrize("names", [("policy",), ("solver", "critic")])
def test_a_succeeded_job_says_where_its_adapters_are(tmp_path, names):
    job = job_document("sums", spec={**STEPS, "agents": [{"name": name} for name in names]})
    agents = {name: AgentProgress(reward=0.25, eval_before=0.0, eval_last=0.5) for name in names}
    usage = {name: UsageAmounts(generated_tokens=0 if name == "critic" else 9) for name in names}
    done = {"phase": Phase.SUCCEEDED, "admitted": False, "reason": "Finished", "step": 40, "finished_at": time.time()}
    versions = dict.fromkeys(names, 40) | ({"critic": 0} if "critic" in names else {})
    leave(tmp_path, a_progress(job, **done, versions=versions, agents=agents, usage=usage), jobs=(job,))
    folders = [OutFolder(tmp_path).job(job.ref) / "adapter" / (name if len(names) > 1 else "") for name in names]
    for folder in folders:
        folder.mkdir(parents=True)
    said = why(tmp_path)
    assert re.match(r"team-a/sums succeeded \d+ s ago, at step 40 of 40, version ", said)
    agent = f" --agent {names[0]}" if len(names) > 1 else ""
    assert f"What to do: Chat with its adapter: `marlaas chat {tmp_path} --job team-a/sums{agent}`." in said
    assert said.endswith(" ".join(f"Agent {name}: {folder}." for name, folder in zip(names, folders, strict=True)))
    assert ("Agent critic was called in no episode of 40 steps" in said) is ("critic" in names)


def test_a_failed_job_and_one_that_the_run_gave_up_say_why(tmp_path):
    ended = {"phase": Phase.FAILED, "admitted": False, "finished_at": time.time()}
    first = a_progress(JOB, **ended, reason="TooManyFaults", message="KeyError: 'x'")
    leave(tmp_path, first, a_progress(OTHER, **ended, reason="RoleFailed", message="trainer-0 exited 5 times"))
    assert why(tmp_path).endswith("Fix it and start a run with another --out.")
    said = why(tmp_path, "other")
    assert "RoleFailed: A process that the job needs failed and is not restarted." in said
    assert "Message: trainer-0 exited 5 times." in said


@pytest.mark.parametrize(("words", "text"), rows(__file__, "unexplained"))
def test_what_cannot_be_explained_is_refused(tmp_path, words, text):
    leave(tmp_path)
    with pytest.raises(InvalidInput, match=text):
        why(tmp_path, *words)
