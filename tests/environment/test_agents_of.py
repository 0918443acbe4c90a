"""`agents_of(task)`: the agents that a task calls. A call of another one is a fault of the environment."""

from pathlib import Path

import pytest

from marlaas.environment import Split, Task
from marlaas.envs.loading import resolve
from marlaas.envs.playing import Outcome, play_episode
from marlaas.envs.scripted import ScriptedReplies
from marlaas.episode_state import EpisodeState
from marlaas_api.errors import InvalidInput

MODULE = """
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


@pytest.fixture(autouse=True)
def _own_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_teams.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))


def played(name: str, args: dict[str, object], index: int = 0) -> tuple[Outcome, EpisodeState, ScriptedReplies]:
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


@pytest.mark.parametrize(
    ("name", "args", "message"),
    [
        ("own_teams:Team", {"extra": ["judge"]}, "`agents_of` names 'judge'; the job's agents are solver, critic"),
        ("own_teams:play", {"named": "solver"}, r"returned 'solver'; expected names of agents, such as \('solver',\)"),
        ("own_teams:play", {"named": None}, "returned None; expected names of agents"),
    ],
)
def test_names_that_the_job_lacks_are_refused(name, args, message):
    with pytest.raises(InvalidInput, match=message):
        played(name, args)


def test_an_attribute_that_is_no_function_is_refused_before_a_job_starts():
    with pytest.raises(InvalidInput, match=r"its `agents_of` is \('solver',\); expected a function of a task"):
        resolve("own_teams:wrong", {}).check_agents(AGENTS)
