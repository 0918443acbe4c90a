"""`marlaas.Run`: a real run that Python starts, follows and reads, and one that is refused."""

import pytest
import yaml
from tests.tables import data

from marlaas import Run
from marlaas.runs import RunFailed
from marlaas_api.errors import InvalidInput
from marlaas_api.kinds import ModelPool, RLJob

POOL, JOB = data(__file__, "python_run")


@pytest.mark.processes
@pytest.mark.slow
def test_a_run_is_started_from_objects_followed_and_read(tmp_path):
    run = Run.start(ModelPool.model_validate(POOL), RLJob.model_validate(JOB), out=tmp_path / "out")
    assert list(yaml.safe_load_all((tmp_path / "out/manifests.yaml").read_text())) == [POOL, JOB]
    with pytest.raises(InvalidInput, match=r"has no summary.json: the run has not ended yet"):
        run.summary()
    assert [step.step for step in run.steps()] == [0]  # it follows the run to its end
    assert run.wait()["team-a/reverse"]["phase"] == "Succeeded"
    again = Run(tmp_path / "out")
    assert (again.jobs(), again.is_running) == (("team-a/reverse",), False)
    assert [one.version for one in again.evaluations("reverse")] == [0, 1]
    assert (again.adapter() / "adapter_config.json").is_file()
    assert {episode.split for episode in again.episodes()} == {"train", "eval"}
    assert again.rows()[0]["metrics/updates"] == 2.0


@pytest.mark.processes
def test_a_run_that_is_refused_says_why(tmp_path):
    (tmp_path / "job.yaml").write_text("kind: RLJob\n")
    with pytest.raises(RunFailed, match=r"exit code 2: .*job.yaml"):
        Run.start(tmp_path / "job.yaml", out=tmp_path / "out").wait()
