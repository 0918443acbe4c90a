"""A multi-agent environment of the `verifiers` library plays through the OpenAI server, unchanged."""

import re
from pathlib import Path

import pytest

from marlaas.environment import Split, Task
from marlaas.envs.loading import resolve
from marlaas.envs.playing import Outcome, play_episode
from marlaas.envs.scripted import RecordedReplies
from marlaas.episode_state import EpisodeState
from marlaas_api.errors import InvalidInput

NAME = "marlaas.verifiers:VerifiersTeam"
PROOF = {"taskset": "proof-taskset"}


@pytest.fixture(autouse=True)
def beside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))


def answers(request) -> str:
    text = request.append[-1].content
    if request.agent == "solver":
        return str(sum(map(int, re.findall(r"\d", text))))
    return "right"


def played(args, answer, *agents: str, max_turns: int = 4) -> tuple[Outcome, RecordedReplies]:
    channel = RecordedReplies(answer, max_turns)
    state = EpisodeState(agents or ("solver", "verifier"), channel, is_strict=True)
    return play_episode(resolve(NAME, args).create(), Task(Split.TRAIN, 0, 7), state), channel


def test_each_agent_has_the_reward_and_metrics_of_its_trace():
    outcome, channel = played(PROOF, answers)
    assert outcome.rewards == {"solver": 1.0, "verifier": 0.5}
    assert outcome.metrics == {"solver/reward/right": 1.0, "verifier/reward/found": 1.0}
    draft, verdict = (one.request for one in channel.asked)
    assert (draft.agent, verdict.agent) == ("solver", "verifier")
    assert verdict.append[-1].content == f"{draft.append[-1].content} {channel.asked[0].reply.text}: right or wrong?"


def test_an_environment_of_the_library_plays_a_taskset():
    def talk(request) -> str:
        if request.agent == "assistant":
            return "14"
        return "###DONE###" if request.parent is not None else "What is 5 + 9?"

    args = {"taskset": "proof-taskset", "env": "user-sim"}
    outcome, channel = played(args, talk, "assistant", "user")
    assert [one.request.agent for one in channel.asked] == ["user", "assistant", "user"]
    assert outcome.metrics["assistant/user_turns"] == 2.0


def test_its_agents_are_known_before_a_job_starts():
    code = resolve(NAME, PROOF)
    code.check_agents(["solver", "verifier"])
    with pytest.raises(InvalidInput, match="needs the agents solver, verifier; the job lacks verifier"):
        code.check_agents(["solver", "critic"])


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"taskset": "no-such-taskset"}, "no_such_taskset"),
        ({"taskset": "proof-taskset", "env": "no-such-env"}, "no_such_env"),
        ({"taskset": "proof-taskset", "settings": {"draft": 2}}, "settings of environment 'proof-taskset'"),
    ],
)
def test_what_is_not_there_is_named(args, message):
    with pytest.raises(InvalidInput, match=message):
        resolve(NAME, args).create()
