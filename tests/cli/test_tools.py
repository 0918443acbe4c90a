"""`marlaas episodes`, `plot`, `usage` and `chat` on a folder as a run leaves it."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from tests.cli.conftest import invoke
from tests.tables import rows

from marlaas.episodes.files import EpisodeWriter
from marlaas.episodes.record import EpisodeRecord, TurnRecord
from marlaas.local.folder import RunRecord, hold
from marlaas.models import prepare
from marlaas_api.documents import job_spec, pool_spec
from marlaas_api.errors import InvalidInput
from marlaas_api.kinds import ModelPoolSpec, RLJobSpec
from marlaas_api.messages import JobDocument, PoolDocument, StopReason
from marlaas_api.names import JobRef, Split, train_group

SPEC = {"poolRef": {"name": "tiny"}, "environment": {"name": "reverse"}, "training": {"steps": 3}}
REF = JobRef("a", "one", "u1")


def write_run(root: Path, model_path: str = "/m", agents: Sequence[dict[str, object]] = ()) -> Path:
    """The folder of a run of job `a/one` that has only begun; return the job's folder."""
    body = {"namespace": "a", "job": "one", "uid": "u1", "pool": "tiny", "tenant": "a"}
    spec = {**SPEC, "agents": list(agents)} if agents else SPEC
    document = JobDocument(**body, spec=job_spec(RLJobSpec.model_validate(spec)))
    pool = pool_spec(ModelPoolSpec.model_validate({"model": {"builtin": "tiny"}}))
    with hold(root) as folder:
        folder.write_record(
            RunRecord(jobs=(document,), pools=(PoolDocument(name="tiny", model_path=model_path, spec=pool),))
        )
        return folder.job(REF)


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """Job `a/one` with three episodes of rewards 0, 1 and 0.5. The first episode has one turn of six tokens."""
    group = train_group(REF, 0)
    body = {"group": group, "split": Split.TRAIN, "index": 0}
    ids = {"output_ids": tuple(range(6)), "num_prompt_tokens": 9, "num_cached_tokens": 4}
    turn = TurnRecord(agent="policy", turn=0, version=0, append="", text="", stop_reason=StopReason.STOP, **ids)
    EpisodeWriter(write_run(tmp_path / "out")).append(
        EpisodeRecord(
            episode=f"{group}-{member}-1",
            **body,
            member=member,
            rewards={"policy": reward},
            turns=(turn,) * (not member),
        )
        for member, reward in enumerate((0.0, 1.0, 0.5))
    )
    return tmp_path / "out"


def save_adapter(folder: Path, *, changes_replies: bool = False) -> None:
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(prepare("tiny"), dtype=torch.float32)
    torch.manual_seed(0)
    config = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=not changes_replies)
    get_peft_model(base, config).save_pretrained(folder)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with an adapter that changes nothing, as version 0 does."""
    root = tmp_path_factory.mktemp("runs") / "out"
    save_adapter(write_run(root, str(prepare("tiny"))) / "adapter")
    return root


@pytest.fixture(scope="module")
def team(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of three agents: `solver` and `second` play a policy whose adapter changes nothing, and critic's changes all replies."""
    root = tmp_path_factory.mktemp("teams") / "out"
    agents = [{"name": "solver"}, {"name": "critic"}, {"name": "second", "policy": {"of": "solver"}}]
    adapters = write_run(root, str(prepare("tiny")), agents) / "adapter"
    save_adapter(adapters / "solver")
    save_adapter(adapters / "critic", changes_replies=True)
    return root


def test_episodes_come_in_the_order_that_is_asked_for_and_nothing_to_show_is_said(out: Path) -> None:
    for option, members in (("--worst", [0, 2, 1]), ("--best", [1, 2, 0]), ("--random", [0, 1, 2]), ("--faults", [])):
        result = invoke("episodes", str(out), option, "--json")
        found = [json.loads(line)["member"] for line in result.stdout.splitlines()]
        assert (result.exit_code, sorted(found) if option == "--random" else found) == (0, members)
    said = invoke("episodes", str(out), "--best", "-n", "1").stdout
    assert (said.count("member"), "a/one" in said, "reward 1" in said) == (1, True, True)
    assert "No episode of step 7 matches." in invoke("episodes", str(out), "--step", "7").stdout
    (out / "a" / "one" / "episodes.jsonl").unlink()
    assert "No episodes are recorded" in invoke("episodes", str(out)).stdout


def test_the_picture_lies_in_the_folder_unless_told_otherwise(out: Path, tmp_path: Path) -> None:
    result = invoke("plot", str(out))
    assert (result.exit_code, result.stdout) == (0, f"{out / 'plot.png'}\n")
    assert (out / "plot.png").read_bytes().startswith(b"\x89PNG")
    write_run(tmp_path / "y")
    assert invoke("plot", str(out), str(tmp_path / "y"), "--out", str(tmp_path / "both.html")).exit_code == 0
    text = (tmp_path / "both.html").read_text()
    assert "out: a/one" in text, "several runs are told apart by their folders"
    assert "y: a/one" in text


def test_usage_is_a_table_csv_or_json(out: Path) -> None:
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


def test_both_sides_answer_what_is_asked_by_option_or_from_a_pipe(trained: Path) -> None:
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
def test_of_several_agents_the_one_that_is_asked_for_answers(team: Path, agent: str, is_changed: bool) -> None:
    options = ("--agent", agent, "--greedy", "--max-tokens", "8", "-p", "reverse: hello", "--json")
    result = invoke("chat", str(team), *options)
    assert result.exit_code == 0, result.output
    told = json.loads(result.stdout)
    assert (told["adapter"] != told["base"]) is is_changed


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ((), "a/one has several agents: choose one with --agent solver or --agent critic"),
        (("--agent", "judge"), "a/one has no agent judge: its agents are solver, critic"),
    ],
)
def test_an_agent_of_several_is_chosen_by_name(team: Path, options: tuple[str, ...], words: str) -> None:
    with pytest.raises(InvalidInput, match=words):
        raise invoke("chat", str(team), *options, "-p", "x").exception


@pytest.mark.parametrize(
    ("arguments", "words"),
    rows(__file__, "refused"),
)
def test_what_cannot_be_is_refused_before_anything_is_read_or_loaded(out: Path, arguments: str, words: str) -> None:
    with pytest.raises(InvalidInput, match=words):
        raise invoke(*arguments.format(out=out).split()).exception
