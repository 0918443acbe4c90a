"""Environments by name: functions and classes with their arguments, and the agents that a task calls (`agents_of`)."""

import pytest
from tests.tables import rows

from marlaas.environment import Agents, Split, Task
from marlaas.envs.loading import resolve
from marlaas.envs.playing import play_episode
from marlaas.envs.scripted import ScriptedReplies
from marlaas.episode_state import EpisodeState
from marlaas_api.errors import InvalidInput

TEAMS = """
def is_hard(task):
    return task.rng.random() < 0.5

def play(task, agents, calls="solver", named=("solver",)):
    agents.critic.reward = 0.5
    for name in calls.split():
        agents[name].say("?")
    return {"solver": task.rng.random()}

play.agents_of = lambda task, calls="solver", named=("solver",): named

class Team:
    def __init__(self, extra=()):
        self.extra = extra

    def agents_of(self, task):
        return ["solver", *(["critic"] if is_hard(task) else []), *self.extra]

    def play(self, task, agents):
        for name in self.agents_of(task):
            agents[name].say("?")
        return 1.0

def wrong(task, agents): ...
wrong.agents_of = ("solver",)
"""
AGENTS = ("solver", "critic")
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
def own_module(tmp_path, monkeypatch):
    sources = {"own_games": MODULE, "own_teams": TEAMS, "own_broken": "import nowhere_to_be_found_later\n"}
    for name, source in sources.items():
        (tmp_path / f"{name}.py").write_text(source)
    monkeypatch.syspath_prepend(str(tmp_path))


def worth(name, args, *agents: str):
    state = EpisodeState(agents, ScriptedReplies([]))
    return resolve(name, args).create().play(Task(Split.TRAIN, 0, 0), Agents(state))


@pytest.mark.parametrize(("name", "args", "agents", "reward"), rows(__file__, "loaded"))
def test_a_function_or_class_is_given_its_arguments_and_agents(name, args, agents, reward):
    assert worth(name, args, *agents) == reward


@pytest.mark.parametrize(("name", "args", "words"), rows(__file__, "environments"))
def test_what_is_wrong_is_said_in_one_sentence(name, args, words):
    with pytest.raises(InvalidInput, match=words) as caught:
        resolve(name, args)
    assert "\n" not in str(caught.value)


def played(name, args, index=0):
    channel = ScriptedReplies(["a"] * 4)
    state = EpisodeState(AGENTS, channel)
    return play_episode(resolve(name, args).create(), Task(Split.TRAIN, index, 0), state), state, channel


def test_the_agents_that_it_names_may_speak_and_the_others_keep_their_rewards():
    outcome, state, channel = played("own_teams:play", {})
    assert state.may_speak == {"solver"}
    assert channel.may_speak == ("solver",)
    drawn = Task(Split.TRAIN, 0, 0).rng.random()
    assert outcome.rewards == {"solver": drawn, "critic": 0.5}, "`agents_of` has used a copy of the task"


@pytest.mark.parametrize("calls", ["critic", "solver critic"])
def test_a_call_of_another_agent_is_a_fault_of_the_environment(calls):
    with pytest.raises(InvalidInput, match="agent 'critic' was called, but `agents_of` does not name it for this task"):
        played("own_teams:play", {"calls": calls})


def test_a_class_may_name_other_agents_for_each_task():
    plays = [played("own_teams:Team", {}, index) for index in range(10)]
    assert {state.may_speak for _, state, _ in plays} == {frozenset({"solver"}), frozenset(AGENTS)}
    assert {channel.may_speak for _, _, channel in plays} == {("solver",), ()}, (
        "nothing is reported if a task may call all"
    )


@pytest.mark.parametrize(("name", "args", "message"), rows(__file__, "named_agents"))
def test_names_that_the_job_lacks_are_refused(name, args, message):
    with pytest.raises(InvalidInput, match=message):
        played(name, args)


def test_an_attribute_that_is_no_function_is_refused_before_a_job_starts():
    with pytest.raises(InvalidInput, match=r"its `agents_of` is \('solver',\); expected a function of a task"):
        resolve("own_teams:wrong", {}).check_agents(AGENTS)
