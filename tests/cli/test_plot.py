from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from marlaas.cli.app import build
from marlaas.local.folder import RunRecord, hold
from marlaas_api.documents import job_spec, pool_spec
from marlaas_api.errors import InvalidInput
from marlaas_api.kinds import ModelPoolSpec, RLJobSpec
from marlaas_api.messages import JobDocument, PoolDocument

SPEC = {"poolRef": {"name": "tiny"}, "environment": {"name": "reverse"}, "training": {"steps": 3}}


def _invoke(*arguments: str) -> Result:
    return CliRunner().invoke(build(arguments), list(arguments))


@pytest.fixture
def outs(tmp_path: Path) -> list[Path]:
    """Two runs of one job that has only begun."""
    body = {"namespace": "a", "job": "one", "uid": "u1", "pool": "tiny", "tenant": "a"}
    document = JobDocument(**body, spec=job_spec(RLJobSpec.model_validate(SPEC)))
    pool = PoolDocument(
        name="tiny", model_path="/m", spec=pool_spec(ModelPoolSpec.model_validate({"model": {"builtin": "tiny"}}))
    )
    for name in ("x", "y"):
        with hold(tmp_path / name) as folder:
            folder.write_record(RunRecord(jobs=(document,), pools=(pool,)))
    return [tmp_path / "x", tmp_path / "y"]


def test_the_picture_lies_in_the_folder_unless_told_otherwise(outs: list[Path]) -> None:
    result = _invoke("plot", str(outs[0]))
    assert (result.exit_code, result.stdout) == (0, f"{outs[0] / 'plot.png'}\n")
    assert (outs[0] / "plot.png").read_bytes().startswith(b"\x89PNG")


def test_several_runs_are_told_apart_by_their_folders(outs: list[Path], tmp_path: Path) -> None:
    result = _invoke("plot", *map(str, outs), "--out", str(tmp_path / "both.html"))
    assert result.exit_code == 0
    text = (tmp_path / "both.html").read_text()
    assert "x: a/one" in text
    assert "y: a/one" in text


def test_a_kind_of_file_that_cannot_be_drawn_is_refused_before_anything_is_read(outs: list[Path]) -> None:
    with pytest.raises(InvalidInput, match=r"expected a file name that ends in .png, .svg, .html"):
        raise _invoke("plot", "nowhere", "--out", "plot.pdf").exception
