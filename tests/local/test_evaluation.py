"""`marlaas eval`: what a run without training plays, and what it refuses."""

import pytest
from tests.harness import changed, job_document
from tests.models.model_folders import write_adapter
from tests.tables import rows

from marlaas.local.documents import DesiredState
from marlaas.local.evaluation import only_evaluating
from marlaas_api.errors import InvalidInput
from marlaas_api.messages.agent_settings import AgentSettings

ADAPTER = '{"peft_type": "LORA", "r": 32, "lora_alpha": 64}'
PAIR = tuple(AgentSettings(name=name) for name in ("solver", "verifier"))


def test_the_jobs_train_no_step_export_nothing_and_begin_with_the_given_adapters(tmp_path):
    pair = changed(job_document(), agents=PAIR, export={"path": "/exports", "trackers": ["wandb"]})
    (job,) = only_evaluating(DesiredState((pair,), ()), {"verifier": write_adapter(tmp_path / "trained", ADAPTER)}).jobs
    solver, verifier = job.spec.agents
    assert (job.spec.training.steps, job.spec.export.path, job.spec.export.trackers) == (0, None, ())
    assert (solver, job.spec.evaluation) == (PAIR[0], pair.spec.evaluation)
    assert (verifier.adapter.rank, verifier.adapter.alpha) == (32, 64)
    assert verifier.init_from.path == str(tmp_path / "trained")


@pytest.mark.parametrize(("agents", "tasks", "given", "words"), rows(__file__, "no_evaluations"))
def test_an_evaluation_that_cannot_be_is_refused(tmp_path, agents, tasks, given, words):
    job = job_document(spec={"agents": agents, "evaluation": {"tasks": tasks}})
    found = write_adapter(tmp_path / "trained", ADAPTER) if given is not None else tmp_path
    with pytest.raises(InvalidInput, match=words):
        only_evaluating(DesiredState((job,), ()), {given or "": found})
