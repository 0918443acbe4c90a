"""docs/openai.md is run: its agent plays, its manifest's environment can be found."""

import re
from pathlib import Path

import pytest
import yaml

from marlaas.environment import EpisodeState, Split, Task
from marlaas.envs.loading import resolve
from marlaas.envs.playing import play_episode
from marlaas.envs.scripted import RecordedReplies

PAGE = Path(__file__).parents[2] / "docs" / "openai.md"


def block(language: str) -> str:
    found = re.search(rf"```{language}\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert found is not None
    return found[1]


def test_the_agent_of_the_page_plays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "adder.py").write_text(block("python"))
    monkeypatch.syspath_prepend(str(tmp_path))
    replies: list[str] = []

    def answer(request) -> str:
        if request.parent is None:
            replies.append(str(sum(map(int, re.findall(r"\d+", request.append[0].content)))))
            return "It is " + replies[0]
        return replies[0]

    channel = RecordedReplies(answer)
    environment = resolve("adder:play", {}).create()
    outcome = play_episode(environment, Task(Split.TRAIN, 0, 7), EpisodeState(["policy"], channel))
    assert outcome.rewards == {"policy": 1.0}
    assert [asked.request.parent for asked in channel.asked] == [None, 0]


def test_the_environment_of_the_manifest_is_found() -> None:
    environment = yaml.safe_load(block("yaml"))["environment"]
    assert resolve(environment["name"], environment["args"]).name == "marlaas.verifiers:Verifiers"
