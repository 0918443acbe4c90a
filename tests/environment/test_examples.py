"""The evaluations of the example manifests have enough different tasks."""

from pathlib import Path

import pytest
import yaml
from tests.environment.playing import said
from tests.tables import rows

from marlaas.environment import Split, Task
from marlaas.envs.loading import resolve
from marlaas.envs.playing import play_episode
from marlaas.envs.scripted import RecordedReplies
from marlaas.episode_state import EpisodeState
from marlaas.manifest.references import anchored_job
from marlaas_api.kinds import RLJob
from marlaas_api.names import derive_seed

EXAMPLES = Path(__file__).parents[2] / "examples"
DOCUMENTS = [
    (path.parent, one)
    for path in sorted(EXAMPLES.rglob("*.yaml"))
    for one in yaml.safe_load_all(path.read_text("utf-8"))
]
JOBS = [anchored_job(RLJob.model_validate(one), folder) for folder, one in DOCUMENTS if one["kind"] == "RLJob"]
FEWEST = 32
OF_GAMES = dict(rows(__file__, "held_out_of_games"))


def held_out(job, environment, index):
    """Play a held-out task of a job with empty replies; return the content that identifies the task."""
    agents = job.spec.called_agents
    task = Task(Split.EVAL, index, derive_seed(job.spec.training.seed, "eval", index))
    channel = RecordedReplies(lambda _: "", 1)
    play_episode(environment, task, EpisodeState(agents, channel))
    return tuple(task.drawn) or said(channel.asked[0].request)


@pytest.mark.parametrize("job", JOBS, ids=lambda job: job.metadata.name)
def test_an_example_evaluates_on_32_different_tasks_or_on_all_that_its_game_has(job):
    environment = resolve(job.spec.environment.name, job.spec.environment.args).create()
    found, fewest = set(), OF_GAMES.get(job.metadata.name, FEWEST)
    for index in range(job.spec.evaluation.tasks):
        found.add(held_out(job, environment, index))
        if len(found) == fewest:
            return
    pytest.fail(f"{len(found)} different tasks, fewer than {fewest}")
