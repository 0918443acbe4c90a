"""Whatever environment code does hurts its own episode, is of the right class, and says what happened."""

import asyncio
import os
import re
import signal
from pathlib import Path

import pytest
from tests.harness import WITHIN_S

from marlaas_api.messages import Ending, FaultClass
from marlaas_worker.sandbox import server
from marlaas_worker.sandbox.server import Server


async def test_an_episode_is_played_and_published(harness):
    first, second = await harness.play("asks", group_size=2, args={"turns": 3})
    assert (first.fault, first.rewards, first.ending) == (None, {"policy": 1.0}, Ending.COMPLETED)
    assert (first.num_turns, first.leaves, first.split, first.index) == (3, {"policy": (2,)}, "train", 0)
    assert (first.episode, second.episode) == ("u1-t0-0-1", "u1-t0-1-1")
    assert {request.member for request in harness.rollout.requests} == {0, 1}


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("raises", ["Traceback", 'secret["reward"]', "KeyError: 'reward'"]),
        ("exits", ["called exit(3)", "sys.exit(3)"]),
        ("ends_at_once", ["exit status 7"]),
        ("is_killed", ["SIGKILL"]),
        ("segfaults", ["SIGSEGV", "in segfaults"]),
        ("returns_nan", ["finite number"]),
        ("paints_the_terminal", [r"\x1b]52;c;ZXZpbA==\x07\x1b[2Jall is well\u202e"]),
        ("returns_too_much", ["1.7e+308", "from -1e+30 to 1e+30"]),
        ("earns_too_much_in_a_tool", ["invalid message", "less than or equal to 1000000"]),
        ("writes_garbage", ["invalid message"]),
        ("writes_a_lot", ["invalid message"]),
        ("claims_a_foreign_turn", ["turn 5, which is not one of its turns"]),
        ("closes_everything", ["closed its connection"]),
        ("floods", ["after the flood", "bytes cut"]),
        ("forks_a_lot", ["too many processes"]),
    ],
)
async def test_a_failing_environment_is_a_fault_of_its_own(harness, name, words):
    (episode,) = await harness.play(name)
    assert (episode.fault, episode.rewards) == (FaultClass.ENV, {})
    assert not [word for word in words if word not in episode.fault_text], episode.fault_text
    assert len(episode.fault_text) < 12_000


@pytest.mark.parametrize(("name", "place"), [("hangs", "in deep_inside"), ("spins", "in spins")])
async def test_a_hanging_environment_is_killed_and_shows_where_it_was(harness, monkeypatch, name, place):
    monkeypatch.setattr(server, "_STACK_S", 20.0)  # with a low share of a busy CPU, it takes long to print its stack
    (episode,) = await harness.play(name, episode_timeout_seconds=3)
    assert episode.fault is FaultClass.ENV
    assert "longer than 3 s" in episode.fault_text
    assert place in episode.fault_text


async def test_a_flood_that_never_ends_is_read_and_ends_with_its_time(harness):
    (episode,) = await harness.play("floods", args={"end": False}, episode_timeout_seconds=1)
    assert episode.fault is FaultClass.ENV
    assert "longer than 1 s" in episode.fault_text


@pytest.mark.parametrize(
    "name",
    ["eats_memory", "leaks", "eats_memory_in_processes", "leaks_after_a_wait", "leaks_in_a_process_after_a_wait"],
)
async def test_memory_is_bounded(harness, name):
    (episode,) = await harness.play(name, memory="100Mi")
    assert episode.fault is FaultClass.ENV
    assert "out of memory" in episode.fault_text


async def test_a_process_that_loading_the_environment_started_is_ended(harness):
    (episode,) = await harness.play("LeavesAProcess", episode_timeout_seconds=30)
    assert (episode.fault, episode.rewards) == (None, {"policy": 1.0})


async def test_a_bad_neighbour_hurts_nobody_else(harness):
    harness.rollout.answer = lambda request: [harness.rollout.result(request, str(request.member))]
    episodes = await harness.play(
        "is_bad_in_turn", group_size=8, memory="150Mi", episode_timeout_seconds=8, concurrency=8
    )
    assert [episode.rewards for episode in episodes[1::2]] == [{"policy": 1.0}] * 4
    assert [episode.fault for episode in episodes[0::2]] == [FaultClass.ENV] * 4


async def test_nothing_that_an_episode_started_outlives_it(harness, tmp_path):
    document = harness.document("rogues:leaves_daemons", args={"file": str(tmp_path / "pid")})
    (episode,) = await harness.play_document(document)
    daemon = int((tmp_path / "pid").read_text())
    assert episode.rewards == {"policy": 1.0}
    async with asyncio.timeout(WITHIN_S):  # it is killed at once; on a busy machine the kernel ends it a moment later
        while _lives(daemon):  # noqa: ASYNC110 (a process of the kernel sets no event)
            await asyncio.sleep(0.01)


def _lives(pid: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rsplit(")")[-1].split()[0]
    except OSError:
        return False


@pytest.mark.parametrize("name", ["comes_back_twice", "leaves_a_thread"])
async def test_one_score_counts_and_leftovers_do_not_matter(harness, name):
    assert [episode.rewards for episode in await harness.play(name, group_size=2)] == [{"policy": 1.0}] * 2


async def test_a_fault_is_played_again(harness, tmp_path, monkeypatch):
    monkeypatch.setenv("MARLAAS_ENVIRONMENT_MARKER", str(tmp_path / "lives"))
    (episode,) = await harness.play("fails_twice", max_attempts=3)
    assert (episode.rewards, episode.episode) == ({"policy": 1.0}, "u1-t0-0-3")
    assert episode.prior_faults == (FaultClass.ENV, FaultClass.ENV)


async def test_a_fault_stands_after_the_last_attempt(harness):
    (episode,) = await harness.play("raises", max_attempts=2)
    assert (episode.fault, episode.episode) == (FaultClass.ENV, "u1-t0-0-2")
    assert episode.prior_faults == (FaultClass.ENV,)


async def test_a_lost_fork_server_is_replaced(harness, tmp_path, monkeypatch):
    monkeypatch.setenv("MARLAAS_ENVIRONMENT_MARKER", str(tmp_path / "killed"))
    (episode,) = await harness.play("kills_the_fork_server", max_attempts=2)
    assert (episode.fault, episode.prior_faults) == (None, (FaultClass.INFRA,))


async def test_a_fork_server_that_no_longer_obeys_is_replaced(harness, monkeypatch):
    monkeypatch.setattr("marlaas_worker.sandbox.server._END_S", 0.2)
    first, second = await harness.play("stops_the_fork_server", group_size=2, concurrency=1)
    assert (first.rewards, second.rewards) == ({"policy": 1.0}, {"policy": 1.0})


@pytest.mark.parametrize(
    ("name", "words", "num_plays"),
    [
        ("unloadable:Broken", ["OSError: the data set is missing", "unloadable.py", "trying hard"], 2),
        ("unloadable:EndsItself", ["exited while it loaded"], 2),
        ("rogues:asks_", ["did you mean 'asks'"], 1),
        ("nowhere:play", ["module 'nowhere' was not found"], 1),
        ("rogues:needs_a_stranger", ["needs the agents stranger; the job lacks stranger (its agents: policy)"], 1),
    ],
)
async def test_an_environment_that_cannot_be_loaded_says_why_and_one_that_does_not_fit_the_job_is_not_tried_again(
    harness, name, words, num_plays
):
    episodes = await harness.play(name, group_size=3, max_attempts=2)
    for episode in episodes:
        assert episode.fault is FaultClass.ENV
        assert not [word for word in words if word not in episode.fault_text], episode.fault_text
        assert (1 + len(episode.prior_faults), episode.is_permanent) == (num_plays, num_plays == 1)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("rewards_a_stranger", "a reward for 'stranger', but the job's agents are policy"),
        ("calls_a_stranger", "the job has no agent 'stranger'; its agents are policy"),
        ("names_a_stranger", "`agents_of` names 'stranger'; the job's agents are policy"),
    ],
)
async def test_an_environment_that_names_an_agent_that_the_job_lacks_is_told_so_once(harness, name, text):
    (episode,) = await harness.play(name, max_attempts=3)
    assert (episode.fault, episode.fault_text, episode.is_permanent) == (FaultClass.ENV, text, True)
    assert (episode.prior_faults, harness.rollout.requests) == ((), [])


async def test_loading_for_ever_is_a_fault(harness):
    harness.load_timeout_s = None
    (episode,) = await harness.play("unloadable:NeverReady", episode_timeout_seconds=0.5)
    assert re.match(r"loading the environment took longer than \d+(\.\d+)? s", episode.fault_text)


@pytest.mark.parametrize(
    "name",
    ["tool_rogues:breaks_in_its_tool", "tool_rogues:dies_in_its_tool", "tool_rogues:closes_everything_in_its_tool"],
)
async def test_what_the_policy_breaks_is_scored(harness, name):
    (episode,) = await harness.play(name)
    assert (episode.fault, episode.ending) == (None, Ending.TOOL_ERROR)
    assert episode.rewards == {"policy": 0.25}


@pytest.mark.parametrize("name", ["tool_rogues:hangs_in_its_tool", "tool_rogues:eats_memory_in_its_tool"])
async def test_a_tool_that_takes_too_much_is_scored(harness, name):
    (episode,) = await harness.play(name, memory="100Mi", episode_timeout_seconds=4)
    assert (episode.fault, episode.ending, episode.rewards) == (None, Ending.TOOL_ERROR, {"policy": 0.25})


async def test_a_kill_from_outside_is_never_the_policys_doing(harness):
    (episode,) = await harness.play("tool_rogues:is_killed_in_its_tool")
    assert episode.fault is FaultClass.ENV


@pytest.mark.parametrize(("goes_on", "fault"), [(False, FaultClass.INFRA), (True, FaultClass.ENV)])
async def test_a_kill_that_the_fork_server_reports_late_or_never_is_not_the_policys_doing(
    harness, tmp_path, monkeypatch, goes_on, fault
):
    name, file = "tool_rogues:is_killed_in_its_tool_while_the_fork_server_is_stopped", tmp_path / "fork server"
    send = Server.order

    async def order(server, order, number, descriptors=()):
        await send(server, order, number, descriptors)
        if order == "kill" and goes_on:
            os.kill(int(file.read_text()), signal.SIGCONT)

    monkeypatch.setattr(Server, "order", order)
    if not goes_on:
        monkeypatch.setattr("marlaas_worker.sandbox.server._END_S", 0.2)
    (episode,) = await harness.play(name, args={"file": str(file)})
    assert episode.fault is fault, episode.fault_text
