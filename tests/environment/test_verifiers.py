"""A taskset of the `verifiers` library plays through the OpenAI server, unchanged."""

import re
import sys
from pathlib import Path

import pytest
from tests.environment.playing import play

from marlaas.environment import Message, Split, Task
from marlaas.envs.loading import resolve
from marlaas.envs.playing import Outcome
from marlaas.envs.scripted import RecordedReplies
from marlaas_api.errors import InvalidInput

NAME = "marlaas.verifiers:Verifiers"


@pytest.fixture(autouse=True)
def beside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))


def adds(request) -> str:
    return str(sum(map(int, re.findall(r"\d+", request.append[-1].content))))


def played(answer, split=Split.TRAIN, index=0, max_turns=4) -> tuple[Outcome, RecordedReplies]:
    return play(NAME, {"taskset": "sums-taskset"}, answer, Task(split, index, 7), max_turns)


def test_its_rewards_and_metrics_are_the_episodes() -> None:
    outcome, channel = played(adds)
    assert outcome.rewards == {"policy": 2.0}
    (asked,) = channel.asked
    assert outcome.metrics["reward/right"] == 1.0
    assert outcome.metrics["length"] == len(asked.reply.text)
    assert asked.request.append[0] == Message("system", "Digits only.")
    assert re.fullmatch(r"\d \+ \d\?", asked.request.append[1].content)


def test_a_wrong_reply_earns_nothing_and_running_out_of_turns_is_scored() -> None:
    outcome, _ = played(lambda _: "no idea")
    assert (outcome.rewards, outcome.metrics["reward/right"]) == ({"policy": 0.0}, 0.0)
    assert played(adds, max_turns=0)[0].ending == "max_turns"


def test_a_held_out_task_is_never_trained_on() -> None:
    def prompts(split: Split) -> set[str]:
        return {played(adds, split, index)[1].asked[0].request.append[1].content for index in range(6)}

    assert not prompts(Split.TRAIN) & prompts(Split.EVAL)


def test_without_the_library_the_way_to_get_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "marlaas.verifiers", raising=False)
    monkeypatch.setitem(sys.modules, "verifiers.v1", None)
    with pytest.raises(InvalidInput, match=r"needs the package 'verifiers.v1': pip install 'marlaas\[verifiers\]'"):
        resolve(NAME, {"taskset": "sums-taskset"})
