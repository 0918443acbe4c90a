"""A taskset of the `verifiers` library plays through the OpenAI server, unchanged."""

import re
import sys
from pathlib import Path

import pytest

from marlaas.environment import EpisodeState, Message, Split, Task
from marlaas.envs.loading import resolve
from marlaas.envs.playing import Outcome, play_episode
from marlaas.envs.scripted import RecordedReplies
from marlaas_api.errors import InvalidInput

NAME = "marlaas.verifiers:Verifiers"


@pytest.fixture(autouse=True)
def beside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))


def adds(request) -> str:
    return str(sum(map(int, re.findall(r"\d+", request.append[-1].content))))


def played(
    answer, split: Split = Split.TRAIN, index: int = 0, max_turns: int = 4, **args
) -> tuple[Outcome, RecordedReplies]:
    channel = RecordedReplies(answer, max_turns)
    environment = resolve(NAME, {"taskset": "sums-taskset", **args}).create()
    return play_episode(environment, Task(split, index, 7), EpisodeState(["policy"], channel)), channel


def test_its_rewards_and_metrics_are_the_episodes() -> None:
    outcome, channel = played(adds)
    assert outcome.rewards == {"policy": 2.0}
    assert (outcome.metrics["reward/right"], outcome.metrics["length"]) == (
        1.0,
        float(len(channel.asked[0].reply.text)),
    )
    (asked,) = channel.asked
    assert asked.request.append[0] == Message("system", "Digits only.")
    assert re.fullmatch(r"\d \+ \d\?", asked.request.append[1].content)


def test_a_wrong_reply_earns_nothing() -> None:
    outcome, _ = played(lambda _: "no idea")
    assert (outcome.rewards, outcome.metrics["reward/right"]) == ({"policy": 0.0}, 0.0)


def test_what_is_held_out_is_never_trained_on() -> None:
    prompts = {
        split: {played(adds, split, index)[1].asked[0].request.append[1].content for index in range(6)}
        for split in Split
    }
    assert not prompts[Split.TRAIN] & prompts[Split.EVAL]


def test_running_out_of_turns_is_scored() -> None:
    assert played(adds, max_turns=0)[0].ending == "max_turns"


def test_a_taskset_that_is_not_there_is_named() -> None:
    with pytest.raises(InvalidInput, match="no_such_taskset"):
        resolve(NAME, {"taskset": "no-such-taskset"}).create()


def test_without_the_library_the_way_to_get_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "marlaas.verifiers", raising=False)
    monkeypatch.setitem(sys.modules, "verifiers.v1", None)
    with pytest.raises(InvalidInput, match=r"needs the package 'verifiers.v1': pip install 'marlaas\[verifiers\]'"):
        resolve(NAME, {"taskset": "sums-taskset"})
