"""Whatever environment code does hurts its own episode, is of the right class, and says what happened."""

import asyncio
import os
import signal
from pathlib import Path

import pytest
from tests.harness import WITHIN_S, changed
from tests.tables import rows

from marlaas_api.messages import Ending, FaultClass, ReplyPhase
from marlaas_api.names import BRANCH_TURNS
from marlaas_worker.sandbox import attempt, server, service
from marlaas_worker.sandbox.server import Server
from marlaas_worker.sandbox.turns import TurnClient, TurnWaited

pytestmark = pytest.mark.processes

FAULTS = dict(rows(__file__, "faults"))
"""What an environment does, and what the text of its fault says."""
POLICYS = ("breaks_in_its_tool", "dies_in_its_tool", "closes_everything_in_its_tool", "eats_memory_in_its_tool")
"""What is scored, because the policy may have caused it in a tool call."""
HARMLESS = ("is_fine", "comes_back_twice", "leaves_a_thread", "limits_a_tool_in_a_thread")


async def played_in_turn(harness, document, names):
    """Play one group, of which each member does another of `rogues`; return the episodes by what they did."""
    members = dict(enumerate(names))

    def answer(request):
        return [harness.rollout.result(request, members[request.member])]

    harness.rollout.answer = answer
    episodes = await harness.play_document(document, len(names))
    return {members[episode.member]: episode for episode in episodes}


async def test_what_an_environment_does_is_a_fault_of_its_own_or_the_policys_and_hurts_no_neighbour(harness):
    document = harness.document("rogues:does_what_it_is_told", memory="100Mi", concurrency=16)
    episodes = await played_in_turn(harness, document, [*FAULTS, *POLICYS, *HARMLESS])
    for name, words in FAULTS.items():
        text = episodes[name].fault_text
        fault = FaultClass.UNSCORED if name == "forgets_its_reward" else FaultClass.ENV
        assert (episodes[name].fault, episodes[name].rewards) == (fault, {}), name
        assert not [word for word in words if word not in text], text
        assert len(text) < 12_000
    scored = {name: (episodes[name].ending, episodes[name].rewards) for name in (*POLICYS, *HARMLESS)}
    of_policy = dict.fromkeys(POLICYS, (Ending.TOOL_ERROR, {"policy": 0.25}))
    assert scored == of_policy | dict.fromkeys(HARMLESS, (Ending.COMPLETED, {"policy": 1.0}))
    assert "ValueError: the policy wrote nonsense" in episodes["breaks_in_its_tool"].tool_error
    assert "exit status" in episodes["dies_in_its_tool"].tool_error


@pytest.mark.parametrize(
    ("then", "fault", "words"),
    [("", None, ""), ("few", FaultClass.ENV, "1 scores for 3 episodes"), ("fails", FaultClass.INFRA, "is away")],
)
async def test_the_episodes_of_a_group_are_compared_after_all_have_been_played(harness, then, fault, words):
    document = harness.document("rogues:Ranks", args={"then": then})
    harness.rollout.answer = lambda asked: [harness.rollout.result(asked, ("7", "no", "9", "8")[asked.member])]
    first, unscored, *others = await harness.play_document(document, 4)
    assert (unscored.fault, unscored.rewards) == (FaultClass.UNSCORED, {})
    assert [one.rewards.get("policy") for one in (first, *others)] == ([None] * 3 if fault else [0.0, 2.0, 1.0])
    for episode in (first, *others):
        assert (episode.fault, episode.num_turns, words in episode.fault_text) == (fault, 1, True)
        assert episode.metrics == ({} if fault else {"size": 1.0, "of": 3.0})


UNFIT = {"num_prompt_tokens": 300, "context_tokens": 256}
REFUSED = {"phase": ReplyPhase.FAILED, "error": "only users", "is_refused": True, "is_permanent": True}


@pytest.mark.parametrize(
    ("reply", "words"),
    [(UNFIT, "has 300 tokens, and the base model's context of 256 tokens"), (REFUSED, "was refused: only users")],
)
async def test_a_prompt_that_the_model_cannot_take_is_the_environments_fault_and_is_asked_once(harness, reply, words):
    harness.rollout.answer = lambda asked: [harness.rollout.result(asked, "").model_copy(update=reply)]
    (episode,) = await harness.play_document(harness.document("rogues:asks", max_attempts=3), 1)
    assert (episode.fault, episode.prior_faults, len(harness.rollout.requests)) == (FaultClass.ENV, (), 1)
    assert (words in episode.fault_text, episode.is_permanent) == (True, reply is REFUSED)


async def test_held_out_demonstrations_are_recorded_apart_and_those_that_cannot_be_are_left_out(harness):
    refuses = lambda asked: REFUSED if asked.append[0].content == "eval 1" else {}  # noqa: E731
    harness.rollout.answer = lambda asked: [harness.rollout.result(asked, "ok").model_copy(update=refuses(asked))]
    document = harness.document("rogues:Shows")
    training = document.spec.training.model_copy(update={"algorithm": "sft", "groups_per_step": 1})
    evaluation = document.spec.evaluation.model_copy(update={"tasks": 4})
    (episode,) = await harness.play_document(changed(document, training=training, evaluation=evaluation))
    asked = [(one.turn // BRANCH_TURNS, one.append[0].content) for one in harness.rollout.requests]
    assert asked == [(0, "train 0"), (1, "eval 0"), (2, "eval 1"), (3, "eval 3")]
    assert [one // BRANCH_TURNS for one in episode.leaves["policy"]] == [0, 1, 3]
    assert (episode.fault, episode.num_tokens) == (None, 3)


@pytest.mark.usefixtures("_time_is_over")
async def test_an_environment_whose_time_is_over_is_killed_and_shows_where_it_was(harness, monkeypatch):
    monkeypatch.setattr(server, "_STACK_S", 120.0)  # with a low share of a busy CPU, it takes long to print its stack
    document = harness.document("rogues:does_what_it_is_told", episode_timeout_seconds=3600)
    episodes = await played_in_turn(harness, document, ["hangs", "spins", "hangs_in_its_tool"])
    in_tool = episodes.pop("hangs_in_its_tool")
    assert (in_tool.fault, in_tool.ending, in_tool.rewards) == (None, Ending.TOOL_ERROR, {"policy": 0.25})
    for name, episode in episodes.items():
        assert episode.fault is FaultClass.ENV
        assert "longer than 3600 s" in episode.fault_text
        assert f"in {name}" in episode.fault_text


@pytest.mark.usefixtures("_time_is_over")
async def test_a_flood_that_never_ends_is_read_and_ends_with_its_time(harness):
    (episode,) = await harness.play("floods_for_ever", episode_timeout_seconds=3600)
    assert episode.fault is FaultClass.ENV
    assert "longer than 3600 s" in episode.fault_text


async def test_a_process_that_loading_the_environment_started_is_ended(harness):
    (episode,) = await harness.play("LeavesAProcess", episode_timeout_seconds=3600)
    assert (episode.fault, episode.rewards) == (None, {"policy": 1.0})
    assert [note[:41] for note in episode.load_notes] == ["loading the environment starts processes "]


async def test_nothing_that_an_episode_started_outlives_it(harness, tmp_path):
    document = harness.document("rogues:leaves_daemons", args={"file": str(tmp_path / "pid")})
    (episode,) = await harness.play_document(document)
    daemon = int((tmp_path / "pid").read_text())
    assert episode.rewards == {"policy": 1.0}
    async with asyncio.timeout(WITHIN_S):  # it is killed at once; on a busy machine the kernel ends it a moment later
        while _lives(daemon):  # noqa: ASYNC110 (a process of the kernel sets no event)
            await asyncio.sleep(0.01)


def _lives(pid):
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rsplit(")")[-1].split()[0]
    except OSError:
        return False


async def test_a_fault_is_played_again_and_stands_after_the_last_attempt(harness, tmp_path, monkeypatch):
    monkeypatch.setenv("MARLAAS_ENVIRONMENT_MARKER", str(tmp_path / "lives"))
    (episode,) = await harness.play("fails_twice", max_attempts=3)
    assert (episode.rewards, episode.episode) == ({"policy": 1.0}, "u1-t0-0-3")
    assert episode.prior_faults == (FaultClass.ENV, FaultClass.ENV)


@pytest.mark.parametrize(("staleness", "attempts"), [(0, 2), (1, 4)])
async def test_a_strict_job_with_equal_attempts_plays_an_environments_fault_twice(harness, staleness, attempts):
    document = harness.document("rogues:raises", max_attempts=4)
    training = document.spec.training.model_copy(update={"max_staleness": staleness})
    document = document.model_copy(update={"spec": document.spec.model_copy(update={"training": training})})
    (episode,) = await harness.play_document(document)
    assert episode.prior_faults == (FaultClass.ENV,) * (attempts - 1)


@pytest.mark.parametrize(
    ("stops_engine", "fault", "prior"),
    [(False, FaultClass.INFRA, (FaultClass.INFRA,)), (True, FaultClass.ENV, ())],
    ids=["a failure of the engine", "a turn that stops the engine is not played again"],
)
async def test_a_turn_that_fails_for_good_is_a_fault(harness, monkeypatch, stops_engine, fault, prior):
    monkeypatch.setattr(service, "_PAUSE_S", 0.01)
    harness.rollout.answer = lambda request: [
        harness.rollout.failure(request, "it is broken", False).model_copy(update={"stops_engine": stops_engine})
    ]
    (episode,) = await harness.play("asks", max_attempts=2)
    assert (episode.fault, episode.prior_faults, episode.is_permanent) == (fault, prior, False)
    assert (episode.fault_text, episode.episode) == ("rollout-0: it is broken", f"u1-t0-0-{1 + len(prior)}")


async def test_a_play_whose_turn_found_no_place_is_no_fault_and_takes_no_name_of_a_later_delivery(harness, monkeypatch):
    monkeypatch.setattr(service, "_PAUSE_S", 0.01)
    generate, names = TurnClient.generate, set()

    async def waits_three_times(client, request, timeout_s):
        names.add(request.episode)
        if len(names) < 4:
            raise TurnWaited("no place")
        return await generate(client, request, timeout_s)

    monkeypatch.setattr(TurnClient, "generate", waits_three_times)
    (episode,) = await harness.play("asks", max_attempts=2)
    assert (episode.fault, episode.prior_faults) == (None, (FaultClass.WAITED,) * 3)
    numbers = {int(name.rsplit("-", 1)[1]) for name in names}
    assert len(numbers) == 4
    assert not set(range(2, 2 * attempt.MAX_DELIVERIES + 2)) & numbers


async def test_a_lost_fork_server_is_replaced(harness, tmp_path, monkeypatch):
    monkeypatch.setattr(service, "_PAUSE_S", 0.01)
    monkeypatch.setenv("MARLAAS_ENVIRONMENT_MARKER", str(tmp_path / "killed"))
    (episode,) = await harness.play("kills_the_fork_server", max_attempts=2)
    assert (episode.fault, episode.prior_faults) == (None, (FaultClass.INFRA,))


async def test_a_fork_server_that_no_longer_obeys_is_replaced(harness, monkeypatch):
    monkeypatch.setattr("marlaas_worker.sandbox.server._SILENCE_S", 0.2)
    first, second = await harness.play("stops_the_fork_server", group_size=2, concurrency=1)
    assert (first.rewards, second.rewards) == ({"policy": 1.0}, {"policy": 1.0})


@pytest.mark.parametrize(("name", "words", "num_plays"), rows(__file__, "not_loaded"))
async def test_an_environment_that_cannot_be_loaded_says_why_and_a_misfit_once(harness, name, words, num_plays):
    for episode in await harness.play(name, group_size=3, max_attempts=2):
        assert episode.fault is FaultClass.ENV
        assert not [word for word in words if word not in episode.fault_text], episode.fault_text
        assert (1 + len(episode.prior_faults), episode.is_permanent) == (num_plays, num_plays == 1)


async def test_a_store_that_does_not_give_the_data_is_waited_for(harness, tmp_path, monkeypatch):
    monkeypatch.setattr(service, "_PAUSE_S", 0.01)
    monkeypatch.setattr("marlaas_worker.sandbox.server._REMEMBERED_S", 0.05)
    document = harness.document("rogues:LoadsLater", args={"loads": str(tmp_path / "loads")}, max_attempts=1)
    (episode,) = await harness.play_document(document)
    assert (episode.fault, set(episode.prior_faults)) == (None, {FaultClass.WAITED})


@pytest.mark.parametrize(("name", "text"), rows(__file__, "strangers"))
async def test_an_environment_that_names_an_agent_that_the_job_lacks_is_told_so_once(harness, name, text):
    (episode,) = await harness.play(name, max_attempts=3)
    assert (episode.fault, episode.fault_text, episode.is_permanent) == (FaultClass.ENV, text, True)
    assert (episode.prior_faults, harness.rollout.requests) == ((), [])


@pytest.mark.parametrize(("goes_on", "fault"), [(False, FaultClass.INFRA), (True, FaultClass.ENV)])
async def test_a_kill_that_is_reported_late_or_never_is_not_the_policys(harness, tmp_path, monkeypatch, goes_on, fault):
    name, file = "rogues:is_killed_in_its_tool_while_the_fork_server_is_stopped", tmp_path / "fork server"
    send = Server.order

    async def order(server, order, number, descriptors=()):
        await send(server, order, number, descriptors)
        if order == "kill" and goes_on:
            os.kill(int(file.read_text()), signal.SIGCONT)

    monkeypatch.setattr(Server, "order", order)
    if not goes_on:
        monkeypatch.setattr("marlaas_worker.sandbox.server._SILENCE_S", 0.2)
    (episode,) = await harness.play(name, args={"file": str(file)})
    assert episode.fault is fault, episode.fault_text
