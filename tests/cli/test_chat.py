"""`marlaas chat` on a folder as a run leaves it, with the builtin tiny model."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from marlaas.cli.app import build
from marlaas.local.folder import RunRecord, hold
from marlaas.models import prepare
from marlaas_api.documents import job_spec, pool_spec
from marlaas_api.errors import InvalidInput
from marlaas_api.kinds import ModelPoolSpec, RLJobSpec
from marlaas_api.messages import JobDocument, PoolDocument
from marlaas_api.names import JobRef

SPEC = {"poolRef": {"name": "tiny"}, "environment": {"name": "reverse"}, "training": {"steps": 3}}


def _invoke(*arguments: str, typed: str | None = None) -> Result:
    return CliRunner().invoke(build(arguments), list(arguments), input=typed)


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with an adapter that changes nothing, as version 0 does."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    model = prepare("tiny")
    root = tmp_path_factory.mktemp("runs") / "out"
    body = {"namespace": "a", "job": "one", "uid": "u1", "pool": "tiny", "tenant": "a"}
    document = JobDocument(**body, spec=job_spec(RLJobSpec.model_validate(SPEC)))
    pool = PoolDocument(
        name="tiny", model_path=str(model), spec=pool_spec(ModelPoolSpec.model_validate({"model": {"builtin": "tiny"}}))
    )
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    with hold(root) as folder:
        folder.write_record(RunRecord(jobs=(document,), pools=(pool,)))
        adapter = folder.job(JobRef("a", "one", "u1")) / "adapter"
    get_peft_model(base, LoraConfig(r=4, target_modules="all-linear")).save_pretrained(adapter)
    return root


def test_both_sides_answer_what_is_asked_by_option(out: Path) -> None:
    result = _invoke("chat", str(out), "--greedy", "--max-tokens", "8", "-p", "reverse: hello", "-p", "again", "--json")
    assert result.exit_code == 0, result.output
    first, second = (json.loads(line) for line in result.stdout.splitlines())
    assert first == {"prompt": "reverse: hello", "base": first["adapter"], "adapter": first["adapter"]}
    assert first["base"]
    assert second["prompt"] == "again"


def test_lines_from_a_pipe_are_answered_side_by_side(out: Path) -> None:
    result = _invoke(
        "chat", str(out), "--greedy", "--max-tokens", "8", typed="reverse: hello\n\n/new\nreverse: hello\n"
    )
    assert result.exit_code == 0, result.output
    assert result.stdout.count("you: reverse: hello") == 2
    heading = next(line for line in result.stdout.splitlines() if "trained" in line)
    assert heading.split() == ["tiny", "a/one,", "trained"]
    answers = [line for line in result.stdout.splitlines() if line.startswith("olle")]
    assert len(set(answers)) <= 1


def test_what_cannot_be_is_refused_before_anything_is_loaded(out: Path, tmp_path: Path) -> None:
    for arguments, words in (
        (("--greedy", "--temperature", "0.5"), "exclude each other"),
        (("--agent", "other"), "has no agent other: its agents are policy"),
        (("--job", "two"), "has no job two"),
    ):
        with pytest.raises(InvalidInput, match=words):
            raise _invoke("chat", str(out), *arguments).exception
    (tmp_path / ".state").mkdir()
    (tmp_path / ".state" / "run.json").write_bytes((out / ".state" / "run.json").read_bytes())
    with pytest.raises(InvalidInput, match="has no adapter in"):
        raise _invoke("chat", str(tmp_path)).exception
