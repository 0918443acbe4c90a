"""Environments by name: functions, classes and tasksets of `verifiers`, their arguments, and the agents that a task calls."""

import re
import sys
from pathlib import Path

import pytest
import yaml
from tests.environment.playing import play
from tests.tables import rows

from marlaas.environment import Agents, Message, Split, Task
from marlaas.envs.loading import resolve
from marlaas.envs.playing import play_episode
from marlaas.envs.scripted import RecordedReplies, ScriptedReplies
from marlaas.episode_state import EpisodeState
from marlaas_api.errors import InvalidInput

AGENTS = ("solver", "critic")


@pytest.fixture(autouse=True)
def own_module(tmp_path, monkeypatch):
    for name, source in yaml.safe_load(
        Path(__file__).with_name("own_modules.yaml").read_text(encoding="utf-8")
    ).items():
        (tmp_path / f"{name}.py").write_text(source)
    monkeypatch.syspath_prepend(str(tmp_path))


@pytest.mark.parametrize(("name", "args", "agents", "reward"), rows(__file__, "loaded"))
def test_a_function_or_class_is_given_its_arguments_and_agents(name, args, agents, reward):
    state = EpisodeState(agents, ScriptedReplies([]))
    assert resolve(name, args).create().play(Task(Split.TRAIN, 0, 0), Agents(state)) == reward


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


NAME, TEAM = "marlaas.verifiers:Verifiers", "marlaas.verifiers:VerifiersTeam"
PROOF = {"taskset": "proof-taskset"}


@pytest.fixture(autouse=True)
def beside(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parent))


def adds(request):
    return str(sum(map(int, re.findall(r"\d+", request.append[-1].content))))


def alone_played(answer, split=Split.TRAIN, index=0, max_turns=4):
    return play(NAME, PROOF, answer, Task(split, index, 7), max_turns)


def test_its_rewards_and_metrics_are_the_episodes():
    outcome, channel = alone_played(adds)
    assert outcome.rewards == {"policy": 2.0}
    (asked,) = channel.asked
    assert (outcome.metrics["reward/right"], outcome.metrics["length"]) == (1.0, len(asked.reply.text))
    assert asked.request.append[0] == Message("system", "Digits only.")
    assert re.fullmatch(r"\d \+ \d\?", asked.request.append[1].content)
    outcome, _ = alone_played(lambda _: "no idea")
    assert (outcome.rewards, outcome.metrics["reward/right"]) == ({"policy": 0.0}, 0.0)
    assert alone_played(adds, max_turns=0)[0].ending == "max_turns"


def test_a_held_out_task_is_never_trained_on():
    def prompts(split):
        return {alone_played(adds, split, index)[1].asked[0].request.append[1].content for index in range(6)}

    assert not prompts(Split.TRAIN) & prompts(Split.EVAL)


def test_without_the_library_the_way_to_get_it_is_named(monkeypatch):
    monkeypatch.delitem(sys.modules, "marlaas.verifiers", raising=False)
    monkeypatch.setitem(sys.modules, "verifiers.v1", None)
    with pytest.raises(InvalidInput, match=r"needs the package 'verifiers.v1': pip install 'marlaas\[verifiers\]'"):
        resolve(NAME, PROOF)


def answers(request):
    text = request.append[-1].content
    if request.agent == "solver":
        return str(sum(map(int, re.findall(r"\d", text))))
    return "right"


def team_played(args, answer, *agents: str, max_turns=4):
    channel = RecordedReplies(answer, max_turns)
    state = EpisodeState(agents or ("solver", "verifier"), channel, is_strict=True)
    return play_episode(resolve(TEAM, args).create(), Task(Split.TRAIN, 0, 7), state), channel


def test_each_agent_has_the_reward_and_metrics_of_its_trace():
    outcome, channel = team_played(PROOF, answers)
    assert outcome.rewards == {"solver": 2.0, "verifier": 0.5}
    draft, verdict = (one.request for one in channel.asked)
    length = {"solver/length": len(channel.asked[0].reply.text)}
    assert outcome.metrics == {"solver/reward/right": 1.0, "verifier/reward/found": 1.0, **length}
    assert (draft.agent, verdict.agent) == ("solver", "verifier")
    assert verdict.append[-1].content == f"{draft.append[-1].content} {channel.asked[0].reply.text}: right or wrong?"


def test_an_environment_of_the_library_plays_a_taskset():
    def talk(request):
        if request.agent == "assistant":
            return "14"
        return "###DONE###" if request.parent is not None else "What is 5 + 9?"

    args = {"taskset": "proof-taskset", "env": "user-sim"}
    outcome, channel = team_played(args, talk, "assistant", "user")
    assert [one.request.agent for one in channel.asked] == ["user", "assistant", "user"]
    assert outcome.metrics["assistant/user_turns"] == 2.0


def test_its_agents_are_known_before_a_job_starts():
    code = resolve(TEAM, PROOF)
    code.check_agents(["solver", "verifier"])
    with pytest.raises(InvalidInput, match="needs the agents solver, verifier; the job lacks verifier"):
        code.check_agents(["solver", "critic"])


@pytest.mark.parametrize(("args", "message"), rows(__file__, "missing_tasksets"))
def test_what_is_not_there_is_named(args, message):
    with pytest.raises(InvalidInput, match=message):
        resolve(TEAM, args).create()
