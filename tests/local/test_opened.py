import pytest

from marlaas.local.folder import RunRecord, hold, write
from marlaas.local.records import open_job, open_jobs
from marlaas_api.documents import pool_spec
from marlaas_api.errors import InvalidInput
from marlaas_api.kinds import ModelPoolSpec
from marlaas_api.messages import PoolDocument


@pytest.fixture
def out(tmp_path, document, step, evaluation):
    """A run of two jobs, one with records."""
    pool = PoolDocument(
        name="tiny", model_path="/m", spec=pool_spec(ModelPoolSpec.model_validate({"model": {"builtin": "tiny"}}))
    )
    first, second = document("reverse"), document("spell", namespace="team-b", uid="u2")
    with hold(tmp_path / "out") as folder:
        folder.write_record(RunRecord(jobs=(first, second), pools=(pool,)))
        steps = "".join(step(first, number).model_dump_json() + "\n" for number in range(2))
        write(folder.job(first.ref) / "steps.jsonl", steps.encode())
        write(
            folder.job(first.ref) / "evals.jsonl", evaluation(first, 0, float("nan")).model_dump_json().encode() + b"\n"
        )
    return tmp_path / "out"


def test_a_run_is_opened_whole_by_job_or_from_a_jobs_own_folder(out):
    assert [one.name for one in open_jobs(out)] == ["team-a/reverse", "team-b/spell"]
    for name in ("spell", "team-b/spell", "team-b.spell"):
        assert open_job(out, name).name == "team-b/spell"
    assert open_job(out / "team-a" / "reverse").name == "team-a/reverse"
    assert open_job(out, "reverse").pool.model_path == "/m"


def test_records_are_read_and_what_is_not_there_yet_is_empty(out):
    assert [record.step for record in open_job(out, "reverse").steps()] == [0, 1]
    assert [record.version for record in open_job(out, "reverse").evals()] == [0]
    assert open_job(out, "spell").steps() == ()


def test_what_cannot_be_opened_is_told(out, tmp_path):
    with pytest.raises(InvalidInput, match="is not an output folder of `marlaas run`"):
        open_jobs(tmp_path)
    with pytest.raises(InvalidInput, match="has no job spel: its jobs are team-a/reverse, team-b/spell"):
        open_jobs(out, "spel")
    with pytest.raises(InvalidInput, match="choose one with --job team-a/reverse or --job team-b/spell"):
        open_job(out)
    (out / "team-a" / "reverse" / "steps.jsonl").write_text("nonsense\n")
    with pytest.raises(InvalidInput, match=r"steps.jsonl has a line"):
        open_job(out, "reverse").steps()
