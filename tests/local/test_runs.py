"""`marlaas.Run`: a run that is refused. tests/loop/test_tour.py follows a real one and reads it."""

import pytest
import yaml
from tests.tables import data

from marlaas import Run
from marlaas.runs import RunFailed
from marlaas_api.errors import InvalidInput
from marlaas_api.kinds import ModelPool, RLJob

POOL, JOB = data(__file__, "python_run")


@pytest.mark.processes
def test_a_run_of_objects_that_is_refused_says_why(tmp_path):
    run = Run.start(ModelPool.model_validate(POOL), RLJob.model_validate(JOB), out=tmp_path / "out")
    assert list(yaml.safe_load_all((tmp_path / "out/manifests.yaml").read_text())) == [POOL, JOB]
    with pytest.raises(InvalidInput, match=r"has no summary.json: the run has not ended yet"):
        run.summary()
    with pytest.raises(RunFailed, match=r"exit code 2: .*absent_module"):
        run.wait()
