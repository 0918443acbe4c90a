"""`marlaas env`: a script is the policy."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from tests.tables import data, rows
from typer.testing import CliRunner

from marlaas.cli.env import app, parsed_args
from marlaas.envs import BUILTINS
from marlaas_api.errors import InvalidInput


def invoke(*words: str, typed=""):
    result = CliRunner().invoke(app, list(words), input=typed)
    return result.exit_code, re.sub(r" +", " ", result.output), result.exception


def test_the_builtins_are_listed_with_their_arguments_which_are_yaml():
    code, output, _ = invoke("list")
    assert code == 0
    assert all(name in output for name in BUILTINS)
    assert isinstance(invoke("play", "revers")[2], InvalidInput), "a wrong name"
    assert "tool_latency_s: float, default 0.0" in output
    parsed = {"a": 1, "b": "x y", "c": {"d": [True]}, "e": "f=g"}
    assert parsed_args(["a=1", "b=x y", "c={d: [true]}", "e=f=g"]) == parsed


def test_a_script_or_a_person_plays_and_sees_turns_reward_and_metrics():
    code, output, _ = invoke("play", "calculator", "--reply", "calc: 40+2", "--reply", "42")
    assert code == 0
    for line in ("policy: calc: 40+2", "tool: 42", "policy: 42", "tool_calls", "reward of policy", "completed"):
        assert line in output
    words = ("play", "reverse", "--split", "eval", "--index", "3")
    word = invoke(*words, typed="x\n")[1].splitlines()[0].removeprefix("user: reverse: ")
    code, output, _ = invoke(*words, typed=f"{word[::-1]}\n")
    assert (code, "reward of policy 1" in output) == (0, True)
    code, output, _ = invoke("play", "calculator", "--reply", "calc: 1+1")
    assert (code, "turn limit reached" in output) == (0, True), "the end of the replies ends the episode"


@pytest.fixture
def own(tmp_path, monkeypatch):
    """Writes `play` into a module of this folder; returns the environment's name."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [*sys.path])

    def write(source):
        module = f"own_{abs(hash(source))}"
        Path(f"{module}.py").write_text(source)
        return f"{module}:play"

    return write


def test_ones_own_environment_is_found_in_this_folder(own):
    name = own("def play(task, agents):\n    return {n: len(a.say('hi').text) for n, a in agents.items()}\n")
    code, output, _ = invoke("play", name, "--agent", "red", "--agent", "blue", "-r", "abc", "-r", "d")
    assert (code, "reward of red 3" in output, "reward of blue 1" in output) == (0, True, True)


IN_PARTS = data(__file__, "in_parts")


def test_replies_are_given_by_agent_then_by_part_and_turn(own):
    replies = ("blue=a", "1", "2", "blue=b", "3", "4", "blue=c", "blue=d=e")
    given = [word for text in replies for word in ("-r", text)]
    code, output, _ = invoke("play", own(IN_PARTS), "--agent", "red", "--agent", "blue", *given)
    assert code == 0, output
    assert "PARTS 12 34 ab cd=e" in output


def test_one_is_any_agent_and_a_script_plays_the_others():
    words = ["play", "solver-verifier", "--as", "verifier", "-r", "solver=14"]
    code, output, _ = invoke(*words, typed="right\nwrong\n")
    assert (code, "reward of verifier 1" in output, "reward of solver 1" in output) == (0, True, True), output
    code, output, _ = invoke(*words, typed="wrong\nright\n")
    assert (code, "reward of verifier 0" in output) == (0, True), output
    code, output, _ = invoke(*words[:-2], typed="right\nwrong\n")
    assert (code, "turn limit reached" in output) == (0, True), "the solver has no replies"


def test_an_environment_that_raises_shows_its_traceback(own):
    code, output, _ = invoke("play", own("def play(task, agent):\n    return agent.say('x').txt\n"), "--reply", "a")
    assert code == 1
    assert "agent.say('x').txt" in output
    assert "not scored" in output


def test_an_environment_finds_the_variables_that_it_finds_in_a_job(own, monkeypatch):
    name = own("import os\n\ndef play(task, agent):\n    return float(os.environ['JUDGE_KEY'])\n")
    monkeypatch.setenv("JUDGE_KEY", "1")
    code, output, _ = invoke("play", name, "--reply", "x")
    assert (code, "set MARLAAS_ENVIRONMENT_JUDGE_KEY instead" in output) == (1, True)
    monkeypatch.setenv("MARLAAS_ENVIRONMENT_JUDGE_KEY", "0.5")
    code, output, _ = invoke("play", name, "--reply", "x")
    assert (code, "reward of policy 0.5" in " ".join(output.split())) == (0, True), output


@pytest.mark.parametrize(
    ("end", "is_told"), [("float(reply == 'x')", True), ("return 0.0", False), ("agent.reward = 0.5", False)]
)
def test_a_forgotten_return_is_told(own, end, is_told):
    name = own(f"def play(task, agent):\n    reply = agent.say('?').text\n    {end}\n")
    code, output, _ = invoke("play", name, "--reply", "x")
    assert (code, "Is a `return` missing?" in output) == (0, is_told)
    assert ("reward of policy unscored" in " ".join(output.split())) == is_told


BESIDE = Path(__file__).with_name("cases.yaml")


@pytest.mark.parametrize(("left", "code", "words"), rows(__file__, "left_behind"))
def test_what_loading_leaves_behind_is_told_or_refused(own, left: str, code: int, words: str) -> None:
    name = own(f"{left.replace('BESIDE', repr(str(BESIDE)))}\ndef play(task, agent):\n    return 1.0\n")
    ran = subprocess.run(
        [sys.executable, "-m", "marlaas", "env", "play", name], capture_output=True, text=True, check=False
    )
    said = " ".join(ran.stderr.split())
    assert (ran.returncode, bool(re.search(words, said)), bool(said)) == (code, True, bool(words)), said


def test_start_episode_runs_before_play_in_functions_classes_and_async_ones(own) -> None:
    name = own(data(__file__, "starts"))
    for each in (name.replace(":play", ":Game"), name):
        assert "reward of policy 1" in " ".join(invoke("play", each)[1].split())


def test_the_same_task_draws_the_same_from_global_generators_as_in_a_job(own) -> None:
    name = own("import random\ndef play(task, agent):\n    return random.random()\n")
    assert len({invoke("play", name, "--index", index)[1] for index in ("0", "0", "1")}) == 2
