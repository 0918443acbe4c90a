"""`python-tool`: what the policy hears of its programs, and what its answer is worth."""

import os
from typing import Any

import pytest
from tests.environment import playing
from tests.sandbox.conftest import SandboxHarness
from tests.tables import rows

from marlaas.envs.loading import resolve
from marlaas.envs.locked.program import Ran
from marlaas.envs.playing import play_episode
from marlaas.envs.python_tool import tool_output
from marlaas.envs.scripted import RecordedReplies
from marlaas.episode_state import EpisodeState
from marlaas_api.errors import InvalidInput
from marlaas_api.messages import Ending

SUMS = {"config": {"min_terms": 2, "max_terms": 2, "operators": ["+"], "allow_negation": False}, "memory_mib": 128}


def play(*replies: str, **args: Any):
    """Play with these replies; `§` stands for what the tool said last. Return what the policy heard, the question first."""
    heard: list[str] = []

    def answer(request):
        heard.append(playing.said(request))
        return replies[len(heard) - 1].replace("§", heard[-1])

    return playing.play("python-tool", {**SUMS, **args}, answer, max_turns=len(replies))[0], heard


def block(code):
    return f"Let me compute.\n```python\n{code}\n```\nThat is it."


def asked_sum():
    _, (question, *_) = play("?")
    return question.removeprefix("Calculate ").rstrip(".").removesuffix("=").strip(" =.")


def test_a_program_is_run_and_told_and_an_answer_needs_none_unless_it_is_asked_for():
    outcome, heard = play(block(f"print({asked_sum()})"), "It is §.")
    assert heard[1].strip("-").isdigit()
    assert outcome.rewards == {"policy": 1.0}
    assert outcome.metrics == {"correct": 1.0, "programs": 1.0, "programs_failed": 0.0, "programs_stopped": 0.0}
    assert outcome.tool_s > 0
    right = str(eval(asked_sum()))
    assert play(right)[0].rewards == {"policy": 1.0}
    assert play(right, needs_program=True)[0].rewards == {"policy": 0.0}
    assert play(block("1/0"), right, needs_program=True)[0].rewards == {"policy": 0.0}
    assert play(block("pass"), right, needs_program=True)[0].rewards == {"policy": 1.0}


@pytest.mark.slow
def test_what_a_program_breaks_is_told_and_the_episode_goes_on():
    outcome, heard = play(
        block("import socket; socket.socket()"), block("x = 1"), block("import sys; sys.exit(2)"), "1"
    )
    assert heard[1].endswith("PermissionError: [Errno 1] Operation not permitted")
    assert heard[2:] == ["[no output]", "[exit code 2]"]
    assert (outcome.ending, outcome.metrics["programs"], outcome.metrics["programs_failed"]) == ("completed", 3.0, 2.0)
    outcome, heard = play(block("import time; time.sleep(10**6)"), "1", cpu_s=1)
    assert heard[1] == "[stopped: it took longer than 4 s]"
    assert (outcome.ending, outcome.metrics["programs_stopped"]) == ("completed", 1.0)


def test_a_machine_that_cannot_lock_up_is_never_the_policys_doing(monkeypatch):
    environment = resolve("python-tool", SUMS).create()
    state = EpisodeState(["policy"], RecordedReplies(lambda _: block("print(1)")))
    monkeypatch.setattr("marlaas.envs.locked.program._START", "raise SystemExit('no locks here')")
    with pytest.raises(Exception, match="so none is run: no locks here"):
        play_episode(environment, playing.first_task(), state)
    with pytest.raises(InvalidInput, match="python-tool: programs cannot be restricted on this machine"):
        resolve("python-tool", SUMS).create()


@pytest.mark.parametrize(("ran", "max_chars", "text"), rows(__file__, "outputs"))
def test_what_is_told_is_cut_and_never_empty(ran, max_chars, text):
    assert tool_output(Ran(*ran), max_chars) == text


ATTACKS = [program.replace("SUPERVISOR", str(os.getpid())) for program in rows(__file__, "attacks")]
"""The sandbox's supervisor runs in this process."""
ENDS = ("PermissionError", "MemoryError", "[stopped: it printed", "[stopped: it took longer")


@pytest.mark.processes
async def test_every_attack_is_the_policys_doing_and_harms_no_episode(tmp_path):
    harness, heard = SandboxHarness(tmp_path), {}

    def answer(request):
        if request.turn > 0:
            heard[request.member] = request.append[-1].content
        attack = f"```python\n{ATTACKS[request.member]}\n```"
        return [harness.rollout.result(request, "I give up." if request.turn else attack)]

    harness.rollout.answer = answer
    document = harness.document("python-tool", args={"cpu_s": 1, "memory_mib": 128}, concurrency=4)
    episodes = await harness.play_document(document, len(ATTACKS))
    scored = (None, "", Ending.COMPLETED, {"policy": 0.0})
    assert [(e.fault, e.fault_text, e.ending, e.rewards) for e in episodes] == [scored] * len(ATTACKS)
    assert {e.metrics["programs_failed"] for e in episodes} == {1.0}
    last_lines = [heard[member].splitlines()[-1] for member in range(len(ATTACKS))]
    assert all(line.startswith(ENDS) for line in last_lines), last_lines
    assert "from-a-policy" not in os.listdir("/tmp")  # noqa: PTH208
