"""`marlaas episodes` on a folder as a run leaves it."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from marlaas.cli.app import build
from marlaas.episodes.files import EpisodeWriter
from marlaas.episodes.record import EpisodeRecord
from marlaas.local.folder import RunRecord, hold
from marlaas_api.documents import job_spec, pool_spec
from marlaas_api.errors import InvalidInput
from marlaas_api.kinds import ModelPoolSpec, RLJobSpec
from marlaas_api.messages import JobDocument, PoolDocument
from marlaas_api.names import JobRef, Split, train_group

SPEC = {"poolRef": {"name": "tiny"}, "environment": {"name": "reverse"}, "training": {"steps": 3}}


def _invoke(*arguments: str) -> Result:
    return CliRunner().invoke(build(arguments), list(arguments))


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """Job `a/one` with three episodes of rewards 0, 1 and 0.5."""
    ref = JobRef("a", "one", "u1")
    body = {"namespace": "a", "job": "one", "uid": "u1", "pool": "tiny", "tenant": "a"}
    document = JobDocument(**body, spec=job_spec(RLJobSpec.model_validate(SPEC)))
    pool = PoolDocument(
        name="tiny", model_path="/m", spec=pool_spec(ModelPoolSpec.model_validate({"model": {"builtin": "tiny"}}))
    )
    with hold(tmp_path / "out") as folder:
        folder.write_record(RunRecord(jobs=(document,), pools=(pool,)))
        group = train_group(ref, 0)
        EpisodeWriter(folder.job(ref)).append(
            EpisodeRecord(
                episode=f"{group}-{member}-1",
                group=group,
                split=Split.TRAIN,
                index=0,
                member=member,
                rewards={"policy": reward},
            )
            for member, reward in enumerate((0.0, 1.0, 0.5))
        )
    return tmp_path / "out"


@pytest.mark.parametrize(
    ("option", "members"), [("--worst", [0, 2, 1]), ("--best", [1, 2, 0]), ("--random", None), ("--faults", [])]
)
def test_episodes_come_in_the_order_that_is_asked_for(out: Path, option: str, members: list[int] | None) -> None:
    result = _invoke("episodes", str(out), option, "--json")
    assert result.exit_code == 0
    found = [json.loads(line)["member"] for line in result.stdout.splitlines()]
    assert (sorted(found) if members is None else found) == ([0, 1, 2] if members is None else members)


def test_people_read_rewards_and_the_limit_holds(out: Path) -> None:
    result = _invoke("episodes", str(out), "--best", "-n", "1")
    assert "a/one" in result.stdout
    assert result.stdout.count("member") == 1
    assert "reward 1" in result.stdout


def test_nothing_to_show_is_said(out: Path) -> None:
    assert "No episode of step 7 matches." in _invoke("episodes", str(out), "--step", "7").stdout
    (out / "a" / "one" / "episodes.jsonl").unlink()
    assert "No episodes are recorded" in _invoke("episodes", str(out)).stdout


def test_what_cannot_be_is_refused(out: Path, tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="--worst and --best exclude each other"):
        raise _invoke("episodes", str(out), "--best", "--worst").exception
    with pytest.raises(InvalidInput, match="is not an output folder"):
        raise _invoke("episodes", str(tmp_path)).exception
