"""The supervisor: claims, publishes, acks, drains, survives; and what environment code may know."""

import asyncio
import contextlib
import hashlib
import json
import os
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
from tests.harness import WITHIN_S, changed
from tests.killing import kill_at

from marlaas.envs import data_digest
from marlaas_api import failpoints, subjects, wire
from marlaas_api.bus import BusUnavailable
from marlaas_api.messages import ChatMessage, Ending, FaultClass, StopReason, TaskMessage
from marlaas_api.messages.job_spec import EvaluationSettings
from marlaas_api.names import Split
from marlaas_api.wire import decode_as
from marlaas_worker.orchestrator.evaluation import EvaluationRun
from marlaas_worker.orchestrator.job_tasks import JobTasks
from marlaas_worker.sandbox import attempt, service, session
from marlaas_worker.sandbox.attempt import MAX_DELIVERIES
from marlaas_worker.sandbox.seclusion import clean_variables
from marlaas_worker.sandbox.server import Child, Children
from marlaas_worker.sandbox.server_start import ChildrenConfig, start_server
from marlaas_worker.sandbox.turns import LEASE_S


@pytest.fixture(autouse=True)
def _no_failpoint():
    yield
    failpoints.hook = None


def num_asking(harness):
    return len({request.episode for request in harness.rollout.requests})


async def test_a_group_is_played_published_and_its_task_acked(harness):
    episodes = await harness.play("asks", group_size=4, args={"turns": 3})
    assert await harness.num_tasks() == 0, "told to stop, a sandbox has settled what it claimed"
    assert [(one.member, one.episode) for one in episodes] == [(member, f"u1-t0-{member}-1") for member in range(4)]
    for one in episodes:
        assert (one.fault, one.rewards, one.ending) == (None, {"policy": 1.0}, Ending.COMPLETED)
        assert (one.num_turns, one.leaves, one.split, one.index) == (3, {"policy": (2,)}, "train", 0)
    assert len({one.prompt for one in episodes}) == 1 == len({one.num_tokens for one in episodes})
    assert (episodes[0].prompt != "", episodes[0].num_tokens > 0, episodes[0].num_cut) == (True, True, 0)
    request = next(one for one in harness.rollout.requests if (one.member, one.turn) == (1, 0))
    assert (request.namespace, request.job, request.uid, request.agent) == ("team-a", "job", "u1", "policy")
    assert (request.group, request.episode, request.parent) == ("u1-t0", "u1-t0-1-1", None)
    assert request.append == (ChatMessage(role="user", content="train 0 0"),)
    assert (request.max_tokens, request.deadline_s) == (None, LEASE_S)


def with_suites(document, suites):
    return changed(document, evaluation=EvaluationSettings.model_validate({"suites": suites}))


async def test_a_suite_is_played_and_compared_by_its_own_environment_and_its_data_set_is_held_out(harness, tmp_path):
    (tmp_path / "sums.jsonl").write_text('{"q": "1 + 1?", "a": 1}\n', encoding="utf-8")
    prompt, truth = [{"role": "user", "content": "{{ q }}"}], "{{ a }}"
    args = {"source": {"files": str(tmp_path / "sums.jsonl")}, "prompt": prompt, "truth": truth, "rewards": ["math"]}
    suites = [
        {"name": "job", "tasks": 1},
        {"name": "ranks", "tasks": 1, "samples": 2, "environment": {"name": "rogues:Ranks"}},
        {"name": "sums", "tasks": 1, "environment": {"name": "dataset", "args": args}},
    ]
    document = with_suites(harness.document("rogues:asks"), suites)
    tasks = JobTasks(document).missing(EvaluationRun(0, 0, document.spec.evaluation, {"policy": 0}))
    async with harness.open(document):
        for task in (harness.task(document), *tasks):
            await harness.put_task(task)
        episodes = sorted(await harness.episodes(5), key=lambda one: (one.split == Split.EVAL, one.index, one.member))
    asked = {one.group: one.append[0].content for one in harness.rollout.requests}
    assert sorted(asked.items()) == [
        ("u1-e0v0", "eval 0 0"),
        ("u1-e1v0", "a number"),
        ("u1-e2v0", "1 + 1?"),
        ("u1-t0", "train 0 0"),
    ]
    assert [(one.rewards["policy"], one.metrics.get("of")) for one in episodes] == [
        (1.0, None),
        (1.0, None),
        (0.0, 2.0),
        (0.0, 2.0),
        (1.0, None),
    ]


async def test_an_episode_names_the_data_that_its_sandbox_has_loaded(harness, tmp_path):
    rows, held_out = files = tmp_path / "rows.jsonl", tmp_path / "held.jsonl"
    for file in files:
        file.write_text(json.dumps({"q": file.name}))
    args = {"source": {"files": str(rows)}, "held_out": {"files": str(held_out)}, "rewards": [{"format": ".*"}]}
    args["prompt"] = [{"role": "user", "content": "{{ q }}"}]
    (episode,) = await harness.play_document(harness.document("dataset", args=args))
    digests = [hashlib.sha256(file.read_bytes()).hexdigest() for file in files]
    assert (episode.fault, episode.data_digest) == (None, data_digest(digests))


async def test_a_suites_environment_that_cannot_be_loaded_is_told_by_its_suite(harness):
    document = harness.document("rogues:asks")
    suites = [{"name": "aime", "environment": {"name": "reverse", "args": {"max_length": 9}}}]
    (episode,) = await harness.play_document(with_suites(document, suites))
    assert (episode.fault, episode.is_permanent) == (FaultClass.ENV, True)
    assert episode.fault_text.startswith("suite aime: reverse: 3 to 9 letters; words have 3 to 5 letters")


@pytest.mark.parametrize("place", ["sandbox.episode.after_publish", "sandbox.task.before_ack"])
async def test_a_crash_between_publishing_and_acking_loses_and_repeats_nothing(harness, place):
    document = harness.document("rogues:asks")
    kill_at(place)
    with pytest.raises(BaseExceptionGroup):  # noqa: PT012
        async with harness.open(document, "first"):
            await harness.put_task(harness.task(document, group_size=3))
            await asyncio.Event().wait()
    assert await harness.num_tasks() == 1
    harness.later(subjects.TASK_ACK_WAIT_S + 1.0)
    async with harness.open(document, "second"):
        episodes = await harness.episodes(3)
    assert await harness.num_tasks() == 0
    assert len(await harness.bus.replay(subjects.EPISODES, "episode.*.*")) == 3
    assert {episode.member for episode in episodes} == {0, 1, 2}


async def test_told_to_stop_it_gives_back_what_does_not_end_soon(harness, monkeypatch):
    monkeypatch.setattr(service, "DRAIN_S", 0.0)
    harness.rollout.answer = lambda request: [harness.rollout.beat(request)]
    document = harness.document("rogues:asks")
    async with harness.open(document, "first"):
        await harness.put_task(harness.task(document))
        await harness.rollout.until(lambda: len(harness.rollout.requests) > 0)
    assert [cancel.episode for cancel in harness.rollout.cancelled] == ["u1-t0-0-1"]
    (delivery,) = await (await harness.open_tasks()).fetch(1, 0.0)
    assert delivery.num_delivered == 2


async def test_told_to_stop_it_finishes_what_ends_soon(harness, monkeypatch):
    monkeypatch.setattr(service, "DRAIN_S", 3600.0)
    document = harness.document("calculator", args={"tool_latency_s": 0.05})
    harness.rollout.answer = lambda request: [harness.rollout.result(request, "1" if request.turn else "calc: 1+1")]
    async with harness.open(document) as context:
        await harness.put_task(harness.task(document))
        await harness.rollout.until(lambda: len(harness.rollout.requests) > 0)
        context.stop.set()
        (episode,) = await harness.episodes(1)
    assert (episode.fault, episode.num_turns) == (None, 2)
    assert 0.05 <= episode.tool_s <= episode.duration_s
    assert await harness.num_tasks() == 0


async def test_a_sandbox_that_waits_for_tasks_stops_at_once_and_plays_the_one_that_comes(harness, monkeypatch):
    monkeypatch.setattr(service, "_FETCH_S", 3600.0)
    (episode,) = await harness.play("asks")
    assert episode.fault is None


async def test_as_many_episodes_as_allowed_run_at_once_and_other_tasks_are_left_to_other_sandboxes(harness):
    harness.rollout.answer = lambda request: []
    document = harness.document("rogues:asks", concurrency=3)
    async with harness.open(document):
        for index in range(3):
            await harness.put_task(harness.task(document, index, group_size=4))
        await harness.rollout.until(lambda: num_asking(harness) == 3)
        left = await (await harness.open_tasks()).fetch(3, 0.0)
        assert [decode_as(TaskMessage, delivery.stored.data).index for delivery in left] == [1, 2]
        assert num_asking(harness) == 3
        await harness.rollout.answer_open()
        await harness.episodes(4)


async def test_at_first_few_episodes_run_at_once_and_after_the_first_all(harness, monkeypatch):
    monkeypatch.setattr(service, "FIRST_EPISODES", 2)
    monkeypatch.setattr(service, "FIRST_S", 3600.0)
    harness.rollout.answer = lambda request: []
    document = harness.document("rogues:asks", concurrency=4)
    async with harness.open(document):
        await harness.put_task(harness.task(document, group_size=5))
        await harness.rollout.until(lambda: num_asking(harness) == 2)
        first = harness.rollout.requests[0].episode
        await harness.rollout.answer_open(
            lambda request: [harness.rollout.result(request, "1")] if request.episode == first else []
        )
        await harness.rollout.until(lambda: num_asking(harness) == 5)
        await harness.rollout.answer_open()
        await harness.episodes(5)


@pytest.mark.parametrize(("uid", "left"), [("u0", 0), ("u2", 1)], ids=["a past job", "the next job"])
async def test_tasks_of_a_past_job_of_the_name_are_forgotten_and_those_of_the_next_one_left(harness, uid, left):
    document = harness.document("rogues:asks")
    other = document.model_copy(update={"uid": uid})
    await harness.bus.ensure()
    await harness.submit(other if left else document)
    async with harness.open(document):
        await harness.put_task(harness.task(other))
        await harness.put_task(harness.task(document))
        (episode,) = await harness.episodes(1)
    assert (episode.uid, await harness.num_tasks()) == ("u1", left)


async def test_an_episode_waits_for_the_bus_and_is_published(harness, monkeypatch):
    monkeypatch.setattr(service, "_PAUSE_S", 0.01)
    document, failures = harness.document("rogues:asks"), iter(range(3))
    async with harness.open(document) as context:
        publish = context.bus.publish

        async def unavailable_at_first(*arguments, **options):
            if next(failures, None) is not None:
                raise BusUnavailable("restarting")
            return await publish(*arguments, **options)

        monkeypatch.setattr(context.bus, "publish", unavailable_at_first)
        await harness.put_task(harness.task(document))
        (episode,) = await harness.episodes(1)
    assert episode.rewards == {"policy": 1.0}
    assert await harness.num_tasks() == 0


async def test_waiting_for_an_engine_counts_neither_against_the_turn_nor_against_the_episode(harness, monkeypatch):
    """While the turn waits, the supervisor's clock goes on by more than the whole episode may take."""
    ahead = [0.0]
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + sum(ahead))
    for module in (attempt, session):
        monkeypatch.setattr(module, "time", clock)
    harness.rollout.answer = lambda request: [harness.rollout.beat(request)]
    document = harness.document("rogues:asks", turn_timeout_seconds=0.1)
    async with harness.open(document):
        await harness.put_task(harness.task(document))
        await harness.rollout.until(lambda: len(harness.rollout.requests) > 0)
        ahead.append(1e6)
        await harness.rollout.answer_open()
        (episode,) = await harness.episodes(1)
    assert (episode.fault, episode.prior_faults, episode.rewards) == (None, (), {"policy": 1.0})
    assert episode.duration_s >= 1e6


async def test_a_turn_that_the_engine_ends_at_its_time_limit_is_a_cut_reply_and_no_fault(harness):
    """The sandbox waits longer than the limit, so that the engine's end of the turn comes first."""

    def answer(request):
        cut = harness.rollout.result(request, "1", StopReason.LENGTH).model_copy(update={"is_overtime": True})
        return [harness.rollout.beat(request, running_s=20.0), cut]

    harness.rollout.answer = answer
    (episode,) = await harness.play("asks", turn_timeout_seconds=0.1)
    assert (episode.fault, episode.num_cut, episode.num_overtime, episode.ending) == (None, 1, 1, Ending.MAX_TOKENS)


@pytest.fixture
async def told(harness, monkeypatch):
    for name in ("NATS_CREDS_SECRET", "AWS_SECRET_ACCESS_KEY", "MARLAAS_NATS_SECRET"):
        monkeypatch.setenv(name, "hidden")
    monkeypatch.setenv("MARLAAS_ENVIRONMENT_JUDGE_SECRET", "meant for it")
    monkeypatch.setenv("LC_ALL", "C.UTF-8")
    episodes = await harness.play("Tells", group_size=3)
    assert [episode.rewards for episode in episodes] == [{"policy": 1.0}] * 3
    return [json.loads(request.append[0].content) for request in harness.rollout.requests]


async def test_an_episode_has_a_copy_of_its_own_and_no_credential_and_the_groups_randomness(told, tmp_path):
    assert {(one["loads"], one["plays"]) for one in told} == {(1, 1)}, "loaded once, and every episode has its own copy"
    assert len({one["loaded_in"] for one in told}) == 1
    assert {str([name for name in one["variables"] if "SECRET" in name]) for one in told} == {"['JUDGE_SECRET']"}
    assert all({"PATH", "LC_ALL"} <= {*one["variables"]} for one in told)
    assert {one["secrets"] for one in told} == {0}, "secrets that the process was started with"
    assert {one["is_home_imported"] for one in told} == {False}
    assert len({one["randomness"] for one in told}) == 1
    folders = {Path(one["folder"]) for one in told}
    assert len(folders) == 3
    assert all(folder.is_relative_to(tmp_path) and not folder.exists() for folder in folders)
    with pytest.raises(ProcessLookupError):
        os.kill(told[0]["loaded_in"], 0)  # nothing of the sandbox is left when it ends


async def test_no_code_of_a_tenant_runs_before_the_credential_is_hidden(harness, tmp_path, monkeypatch):
    """Python runs a `sitecustomize` that it finds in PYTHONPATH before any line of ours."""
    (tmp_path / "early").mkdir()
    for name in ("sitecustomize.py", "usercustomize.py"):
        (tmp_path / "early" / name).write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    monkeypatch.setenv("MARLAAS_ENVIRONMENT_PYTHONPATH", str(tmp_path / "early"))
    await harness.play("Tells")
    assert "PYTHONPATH" in json.loads(harness.rollout.requests[0].append[0].content)["variables"]
    assert not (tmp_path / "ran").exists()


async def test_a_play_that_is_cancelled_again_while_its_child_dies_leaves_none_of_its_pipes_open(tmp_path):
    config = ChildrenConfig("reverse", {}, 1 << 29, 30.0, tmp_path, clean_variables(os.environ))
    children = Children(partial(start_server, config))
    forked: asyncio.Future[Child] = asyncio.get_running_loop().create_future()

    async def play():
        async with children.child() as child:
            forked.set_result(child)
            await asyncio.Event().wait()

    playing = asyncio.create_task(play())
    child = await forked
    playing.cancel()
    await asyncio.sleep(0)
    playing.cancel()
    await asyncio.wait({playing})
    assert child.writer.is_closing()
    await child.ended
    await children.close()


async def test_each_sandbox_finds_the_environment_in_the_folder_of_its_own_manifest(harness, tmp_path, monkeypatch):
    for name, reward in (("ours", 1.0), ("elsewhere", 0.0)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "game.py").write_text(f"def play(task, agent):\n    return {reward}\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "elsewhere"), prepend=os.pathsep)
    harness.modules = tmp_path / "ours"
    (episode,) = await harness.play("game:play")
    assert episode.rewards == {"policy": 1.0}


async def test_what_a_chat_client_imports_at_its_first_call_is_imported_before_the_episodes(harness, tmp_path):
    needed = {"marlaas.openai_server", "openai.resources.chat"}
    play = f"def play(task, agent):\n    return float({needed!r} <= sys.modules.keys())\n"
    (tmp_path / "game.py").write_text(
        f"import sys\nimport openai\nassert not sys.modules.keys() & {needed!r}\n\n\n{play}"
    )
    harness.modules = tmp_path
    (episode,) = await harness.play("game:play")
    assert episode.rewards == {"policy": 1.0}, episode.fault_text


async def test_of_two_jobs_in_one_process_each_plays_its_own_module_and_the_end_of_ones_fork_server_harms_no_other(
    harness, tmp_path
):
    document = harness.document("game:play")
    other = document.model_copy(update={"job": "other", "uid": "u2"})
    await harness.bus.ensure()
    consumer = subjects.consumer("team-a", "other", "sandbox")
    await harness.bus.consumer(subjects.TASKS, consumer, "task.team-a.other", ack_wait_s=subjects.TASK_ACK_WAIT_S)
    async with contextlib.AsyncExitStack() as stack:
        for one, code in ((document, "return 0.25"), (other, "os.kill(os.getppid(), 9) or signal.pause()")):
            harness.modules = tmp_path / one.job
            harness.modules.mkdir()
            (harness.modules / "game.py").write_text(f"import os, signal\ndef play(task, agent):\n    {code}\n")
            await stack.enter_async_context(harness.open(one, f"sandbox-of-{one.job}"))
        for one in (other, document):
            await harness.put_task(harness.task(one, group_size=4))
        episodes = await harness.episodes(8)
    ended = {(one.job, one.fault, one.rewards.get("policy")) for one in episodes}
    assert ended == {("job", None, 0.25), ("other", FaultClass.INFRA, None)}


async def test_a_module_beside_the_manifest_that_would_replace_one_of_pythons_is_refused(harness, tmp_path):
    (tmp_path / "calendar.py").touch()
    harness.modules = tmp_path
    (episode,) = await harness.play("is_fine")
    assert episode.is_permanent
    assert "calendar.py in" in episode.fault_text
    assert "has the name of a module of Python itself" in episode.fault_text


async def test_attempts_go_on_counting_over_deliveries_and_preemptions_and_ended_members_are_not_played(harness):
    document = harness.document("rogues:asks", max_attempts=3)
    await harness.bus.ensure()
    issued = {"num_preemptions": 2, "ended": (0,)}
    await harness.put_task(harness.task(document, group_size=2).model_copy(update=issued))
    consumer = await harness.open_tasks()
    (delivery,) = await consumer.fetch(1, 1.0)
    await delivery.nak()
    async with harness.open(document):
        (episode,) = await harness.episodes(1)
    assert await harness.num_tasks() == 0
    assert episode.episode == "u1-t0-1-2000004"
    assert len(await harness.bus.replay(subjects.EPISODES, "episode.*.*")) == 1


async def test_a_task_that_kills_every_sandbox_is_given_up(harness):
    document = harness.document("rogues:asks", max_attempts=1)
    await harness.bus.ensure()
    await harness.put_task(harness.task(document, group_size=2))
    consumer = await harness.open_tasks()
    for _ in range(MAX_DELIVERIES):
        (delivery,) = await consumer.fetch(1, 1.0)
        await delivery.nak()
    async with harness.open(document):
        episodes = await harness.episodes(2)
    assert await harness.num_tasks() == 0
    assert [episode.fault for episode in episodes] == [FaultClass.INFRA] * 2
    assert "never finished" in episodes[0].fault_text


@pytest.mark.parametrize("unreadable", ["task", "document of the next job of the name", "garbage"])
async def test_a_task_that_cannot_be_read_is_claimed_once_and_left_to_newer_sandboxes(harness, monkeypatch, unreadable):
    document = harness.document("rogues:asks")
    is_next_job = unreadable.startswith("document")
    latest = document.model_copy(update={"uid": "u2"}) if is_next_job else document
    task = wire.encode(harness.task(latest))
    await harness.bus.ensure()
    with monkeypatch.context() as newer:
        newer.setattr(wire, "SCHEMA_VERSION", wire.SCHEMA_VERSION + 1)
        await harness.submit(latest)
        task = task if is_next_job else wire.encode(harness.task(latest))
    task = b"garbage" if unreadable == "garbage" else task
    async with harness.open(document) as context:
        for is_ready in (True, False):
            async with asyncio.timeout(WITHIN_S):
                while context.metrics.ready() != is_ready:  # noqa: ASYNC110 (a metric sets no event)
                    await asyncio.sleep(0.01)
            if is_ready:
                await harness.bus.publish("task.team-a.job", task)
        (delivery,) = await (await harness.open_tasks()).fetch(1, WITHIN_S)
        assert delivery.num_delivered == 2
