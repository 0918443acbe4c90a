"""The supervisor: claims, publishes, acks, drains, survives; and what environment code may know."""

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.killing import kill_at

from marlaas_api import failpoints, subjects
from marlaas_api.messages import TaskMessage
from marlaas_api.wire import decode_as
from marlaas_worker.sandbox import places
from marlaas_worker.sandbox.seclusion import clean_variables, given_variables


@pytest.fixture(autouse=True)
def _no_failpoint() -> Iterator[None]:
    yield
    failpoints.hook = None


async def all_acked(harness) -> None:
    """Told to stop, a sandbox has settled what it claimed; nothing is left in the work queue then."""
    assert await harness.num_tasks() == 0


async def crash(harness, document) -> None:
    """Run a sandbox on one task of three members until it dies."""
    async with harness.open(document, "first"):
        await harness.put_task(harness.task(document, group_size=3))
        await asyncio.Event().wait()


async def test_a_task_is_acked_when_all_its_members_are_published(harness):
    document = harness.document("rogues:asks")
    episodes = await harness.play_document(document, 4)
    await all_acked(harness)
    assert {episode.member for episode in episodes} == {0, 1, 2, 3}


@pytest.mark.parametrize("place", ["sandbox.episode.after_publish", "sandbox.task.before_ack"])
async def test_a_crash_between_publishing_and_acking_loses_and_repeats_nothing(harness, place):
    document = harness.document("rogues:asks")
    kill_at(place)
    with pytest.raises(BaseExceptionGroup):
        await crash(harness, document)
    assert await harness.num_tasks() == 1
    later = harness.server.clock() + 11.0
    harness.server.clock = lambda: later
    harness.server.wake()
    async with harness.open(document, "second"):
        episodes = await harness.episodes(3)
    await all_acked(harness)
    stored = await harness.bus.replay(subjects.EPISODES, "episode.*.*")
    assert len(stored) == 3
    assert {episode.member for episode in episodes} == {0, 1, 2}


async def test_told_to_stop_it_gives_back_what_does_not_end_soon(harness, monkeypatch):
    monkeypatch.setattr("marlaas_worker.sandbox.service.DRAIN_S", 0.1)
    harness.rollout.answer = lambda request: [harness.rollout.beat(request)]
    document = harness.document("rogues:asks")
    async with harness.open(document, "first"):
        await harness.put_task(harness.task(document))
        await harness.rollout.until(lambda: len(harness.rollout.requests) > 0)
    assert [cancel.episode for cancel in harness.rollout.cancelled] == ["u1-t0-0-1"]
    harness.rollout.answer = lambda request: [harness.rollout.result(request, "1")]
    async with harness.open(document, "second"):
        (episode,) = await harness.episodes(1)
    assert episode.rewards == {"policy": 1.0}


async def test_told_to_stop_it_finishes_what_ends_soon(harness):
    document = harness.document("calculator", args={"tool_latency_s": 0.5})
    harness.rollout.answer = lambda request: [harness.rollout.result(request, "1" if request.turn else "calc: 1+1")]
    async with harness.open(document) as context:
        await harness.put_task(harness.task(document))
        await harness.rollout.until(lambda: len(harness.rollout.requests) > 0)
        context.stop.set()
        (episode,) = await harness.episodes(1)
    assert (episode.fault, episode.num_turns) == (None, 2)
    assert 0.5 <= episode.tool_s <= episode.duration_s
    assert await harness.num_tasks() == 0


async def test_as_many_episodes_as_allowed_run_at_once_and_no_more(harness):
    running: set[str] = set()
    most = 0

    def answer(request):
        nonlocal most
        running.discard(request.episode) if request.turn else running.add(request.episode)
        most = max(most, len(running))
        return [harness.rollout.result(request, "1")] if most == 3 else []

    harness.rollout.answer = answer
    document = harness.document("rogues:asks", args={"turns": 2}, concurrency=3)
    async with harness.open(document):
        for index in range(3):
            await harness.put_task(harness.task(document, index, group_size=4))
        assert all(episode.fault is None for episode in await harness.episodes(12))
    assert most == 3


async def test_tasks_are_left_to_sandboxes_that_have_a_place(harness):
    harness.rollout.answer = lambda request: []
    document = harness.document("rogues:asks", concurrency=2)
    async with harness.open(document):
        for index in range(3):
            await harness.put_task(harness.task(document, index, group_size=2))
        await harness.rollout.until(lambda: len({request.episode for request in harness.rollout.requests}) == 2)
        other = await harness.open_tasks()
        left = await other.fetch(3, 0.2)
        assert [decode_as(TaskMessage, delivery.stored.data).index for delivery in left] == [1, 2]
        harness.rollout.answer = lambda request: [harness.rollout.result(request, "1")]
        await harness.episodes(2)


def num_asking(harness) -> int:
    return len({request.episode for request in harness.rollout.requests})


async def test_at_first_few_episodes_run_at_once_and_after_the_first_end_all(harness, monkeypatch):
    monkeypatch.setattr(places, "FIRST_EPISODES", 2)
    monkeypatch.setattr(places, "FIRST_S", 3600.0)
    harness.rollout.answer = lambda request: []
    document = harness.document("rogues:asks", concurrency=6)
    async with harness.open(document):
        for index in range(4):
            await harness.put_task(harness.task(document, index, group_size=2))
        await harness.rollout.until(lambda: num_asking(harness) == 2)
        (left,) = await (await harness.open_tasks()).fetch(1, 0.2)
        assert decode_as(TaskMessage, left.stored.data).index == 1
        await left.nak()
        first = harness.rollout.requests[0].episode

        def answer(request):
            return [harness.rollout.result(request, "1")] if request.episode == first else []

        harness.rollout.answer = answer
        await harness.rollout.until(lambda: num_asking(harness) == 7)
        harness.rollout.answer = lambda request: [harness.rollout.result(request, "1")]
        await harness.episodes(8)


async def test_if_the_first_episodes_take_long_the_others_begin_without_an_end(harness, monkeypatch):
    monkeypatch.setattr(places, "FIRST_EPISODES", 1)
    monkeypatch.setattr(places, "FIRST_S", 0.01)
    harness.rollout.answer = lambda request: []
    document = harness.document("rogues:asks", concurrency=4)
    async with harness.open(document):
        await harness.put_task(harness.task(document, group_size=4))
        await harness.rollout.until(lambda: num_asking(harness) == 4)
        harness.rollout.answer = lambda request: [harness.rollout.result(request, "1")]
        await harness.episodes(4)


async def test_tasks_of_a_past_job_of_the_same_name_are_forgotten(harness):
    document = harness.document("rogues:asks")
    await harness.bus.ensure()
    await harness.submit(document)
    async with harness.open(document):
        await harness.put_task(harness.task(document.model_copy(update={"uid": "u0"})))
        await harness.bus.publish("task.team-a.job", b"garbage")
        await harness.put_task(harness.task(document))
        (episode,) = await harness.episodes(1)
    await all_acked(harness)
    assert episode.uid == "u1"


async def test_tasks_of_the_next_job_of_the_same_name_are_left_alone(harness):
    document = harness.document("rogues:asks")
    await harness.bus.ensure()
    await harness.submit(document.model_copy(update={"uid": "u2"}))
    async with harness.open(document):
        await harness.put_task(harness.task(document.model_copy(update={"uid": "u2"})))
        await harness.put_task(harness.task(document))
        await harness.episodes(1)
    assert await harness.num_tasks() == 1


async def test_an_episode_waits_for_the_bus(harness):
    document = harness.document("rogues:asks")

    def vanish(request):
        harness.server.available = False
        asyncio.get_running_loop().call_later(0.2, setattr, harness.server, "available", True)
        return []

    async with harness.open(document):
        harness.rollout.answer = vanish
        await harness.put_task(harness.task(document))
        await harness.rollout.until(lambda: len(harness.rollout.requests) > 0)
        harness.rollout.answer = lambda request: [harness.rollout.result(request, "1")]
        await harness.rollout.until(lambda: len(harness.rollout.requests) > 1)
        (episode,) = await harness.episodes(1)
    assert episode.rewards == {"policy": 1.0}


async def test_an_environment_is_loaded_once_and_every_episode_has_its_own_copy(harness):
    await harness.play("Loaded", group_size=4)
    told = {str(request.append[0].content) for request in harness.rollout.requests}
    assert len(told) == 1
    assert told.pop().endswith(" 1 1")


async def test_environment_code_sees_no_credential_and_its_own_secrets(harness, monkeypatch):
    for name in ("NATS_CREDS_SECRET", "AWS_SECRET_ACCESS_KEY", "MARLAAS_NATS_SECRET"):
        monkeypatch.setenv(name, "hidden")
    monkeypatch.setenv("MARLAAS_ENVIRONMENT_JUDGE_SECRET", "meant for it")
    (episode,) = await harness.play("tells_its_variables")
    variables = str(harness.rollout.requests[0].append[0].content).split("\n")
    assert [name for name in variables if "SECRET" in name] == ["JUDGE_SECRET"]
    assert episode.rewards == {"policy": 0.0}, "a secret that the process was started with"


def test_only_harmless_variables_are_inherited():
    variables = {"PATH": "/bin", "LC_ALL": "C", "AWS_KEY": "x", "MARLAAS_ENVIRONMENT_A": "1", "B": "2"}
    cleaned = clean_variables(variables)
    assert {"PATH", "LC_ALL"} <= set(cleaned)
    assert not {"AWS_KEY", "A", "B", "MARLAAS_ENVIRONMENT_A"} & set(cleaned)
    assert given_variables(variables) == {"A": "1"}


async def test_no_code_of_a_tenant_runs_before_the_credential_is_hidden(harness, tmp_path, monkeypatch):
    """Python runs a `sitecustomize` that it finds in PYTHONPATH before any line of ours."""
    (tmp_path / "early").mkdir()
    for name in ("sitecustomize.py", "usercustomize.py"):
        (tmp_path / "early" / name).write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    monkeypatch.setenv("MARLAAS_ENVIRONMENT_PYTHONPATH", str(tmp_path / "early"))
    await harness.play("tells_its_variables")
    assert "PYTHONPATH" in str(harness.rollout.requests[0].append[0].content).split("\n")
    assert not (tmp_path / "ran").exists()


async def test_what_an_episode_left_at_home_is_imported_by_no_later_fork_server(harness):
    (episode,) = await harness.play("ignores_what_lies_at_home")
    assert episode.rewards == {"policy": 1.0}


async def test_members_of_a_group_find_the_same_randomness_and_their_own_folder(harness, tmp_path):
    await harness.play("tells_its_randomness", group_size=3)
    told = [str(request.append[0].content).rsplit(" ", 1) for request in harness.rollout.requests]
    assert len({numbers for numbers, _ in told}) == 1
    folders = {Path(folder) for _, folder in told}
    assert len(folders) == 3
    assert all(folder.is_relative_to(tmp_path) and not folder.exists() for folder in folders)


async def test_nothing_of_the_sandbox_is_left_when_it_ends(harness):
    document = harness.document("rogues:Loaded")
    async with harness.open(document):
        await harness.put_task(harness.task(document))
        await harness.episodes(1)
    pid = str(harness.rollout.requests[0].append[0].content).split()[0]
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid), 0)
