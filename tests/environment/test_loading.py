from pathlib import Path

import pytest

from marlaas.environment import Agents, Split, Task
from marlaas.envs.loading import resolve
from marlaas.envs.scripted import ScriptedReplies
from marlaas.episode_state import EpisodeState
from marlaas_api.errors import InvalidInput

OWN = """
import nowhere_to_be_found_later
"""
MODULE = """
def play(task, agent, *, bonus: float = 0.0, words=("a",)):
    return bonus

def one(task): ...

class Game:
    def __init__(self, size: int, depth: "int" = 2, strict: bool = False):
        self.size = size

    def play(self, task, agents):
        return {name: self.size for name in agents}

class Loose:
    def __init__(self, **anything):
        self.anything = anything

    def play(self, task, agent):
        return float(len(self.anything))

class NoPlay: ...

class Odd:
    def play(self, task, agent, more): ...

number = 3
"""


@pytest.fixture(autouse=True)
def own_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_games.py").write_text(MODULE)
    (tmp_path / "own_broken.py").write_text(OWN)
    monkeypatch.syspath_prepend(str(tmp_path))


def worth(name: str, args: dict[str, object], *agents: str) -> object:
    state = EpisodeState(agents, ScriptedReplies([]))
    return resolve(name, args).create().play(Task(Split.TRAIN, 0, 0), Agents(state))


@pytest.mark.parametrize(
    ("name", "args", "agents", "reward"),
    [
        ("own_games:play", {"bonus": 2}, ["policy"], 2),
        ("own_games:Game", {"size": 3}, ["white", "black"], {"white": 3, "black": 3}),
        ("own_games:Loose", {"a": 1, "b": 2}, ["policy"], 2.0),  # it takes any argument
    ],
)
def test_a_function_or_class_is_given_its_arguments_and_agents(name, args, agents, reward) -> None:
    assert worth(name, args, *agents) == reward


@pytest.mark.parametrize(
    ("name", "args", "words"),
    [
        ("revers", {}, "did you mean 'reverse'.*builtin environments are calculator"),
        ("own_games", {}, "others are named module:attribute"),
        ("own_game:play", {}, "module 'own_game' was not found beside the manifest or on PYTHONPATH"),
        ("own_games:plays", {}, "did you mean 'play'"),
        ("own_broken:play", {}, "importing own_broken failed: ModuleNotFoundError.*nowhere_to_be_found_later"),
        ("own_games:number", {}, "int; expected a function or a class"),
        ("own_games:NoPlay", {}, "no method `play"),
        ("own_games:one", {}, "takes 1 positional"),
        ("own_games:Odd", {}, "takes task and agent only"),
        ("own_games:play", {"bonuss": 1}, "no argument 'bonuss'; did you mean 'bonus'.*it takes bonus, words"),
        ("own_games:play", {"bonus": "high"}, "argument 'bonus' is 'high'; expected float"),
        ("own_games:Game", {}, "needs the argument 'size'"),
        ("own_games:Game", {"size": True}, "'size' is True; expected int"),
        ("own_games:Game", {"size": 1, "depth": "x"}, "'depth' is 'x'; expected int"),
        ("reverse", {"min_lenght": 3}, "did you mean 'min_length'"),
    ],
)
def test_what_is_wrong_is_said_in_one_sentence(name: str, args: dict[str, object], words: str) -> None:
    with pytest.raises(InvalidInput, match=words) as caught:
        resolve(name, args)
    assert "\n" not in str(caught.value)


def test_one_agent_is_not_chosen_among_many() -> None:
    with pytest.raises(InvalidInput, match=r"takes one agent, but the job has 2 .a, b.:"):
        worth("own_games:play", {}, "a", "b")
