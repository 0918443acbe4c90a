"""What docs/agents.md shows can be played, and its manifest is valid."""

import re
from pathlib import Path

import pytest
import yaml

from marlaas.environment import Split, Task
from marlaas.envs.loading import resolve
from marlaas.envs.playing import play_episode
from marlaas.envs.scripted import RecordedReplies
from marlaas.episode_state import EpisodeState
from marlaas_api.kinds import RLJob
from marlaas_api.kinds.checks import check_supported

PAGE = (Path(__file__).parents[2] / "docs" / "agents.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize(
    ("name", "agents", "rewards"),
    [
        ("team", ("solver", "verifier"), {"solver": 1.0, "verifier": 1.0}),
        ("debate", ("planner", "critic"), {"planner": 0.0, "critic": 0.0}),
    ],
)
def test_the_environments_of_the_page_can_be_played(tmp_path, monkeypatch, name, agents, rewards):
    (code,) = [text for language, text in BLOCKS if language == "python" and text.startswith(f"# {name}.py")]
    (tmp_path / f"{name}.py").write_text(code)
    monkeypatch.syspath_prepend(str(tmp_path))
    environment = resolve(f"{name}:play", {})
    environment.check_agents(agents)
    state = EpisodeState(agents, RecordedReplies(answer), is_strict=True)
    outcome = play_episode(environment.create(), Task(Split.TRAIN, 0, 7), state)
    assert outcome.rewards == rewards


def answer(request) -> str:
    asked = request.append[-1].content
    sums = re.match(r"(\d+)\+(\d+)=", asked)
    if request.agent == "verifier":
        return "Right."
    return str(int(sums[1]) + int(sums[2])) if sums else "the same"


def test_the_agents_of_the_page_are_a_valid_manifest():
    (agents,) = [yaml.safe_load(text) for language, text in BLOCKS if language == "yaml"]
    spec = {"poolRef": {"name": "tiny"}, "environment": {"name": "team:play"}, "training": {"steps": 3}} | agents
    job = RLJob.model_validate(
        {"apiVersion": "marlaas.dev/v1alpha1", "kind": "RLJob", "metadata": {"name": "team"}, "spec": spec}
    )
    assert list(check_supported(job)) == []
    assert [agent.trainable for agent in job.spec.agents] == [True, True, False, True]
