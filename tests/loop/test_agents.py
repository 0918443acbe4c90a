"""Several agents in a job. In strict mode the adapters are the same bit for bit, whatever the pace of turns and whichever role is killed."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from tests.killing import Killed
from tests.loop.harness import Loop, document, kill_at_each, weights_of
from tests.loop.recorded import Recorded

from marlaas_api import subjects, wire
from marlaas_api.bus import Request
from marlaas_api.messages import Episode, JobDocument, Manifest, Phase, Pin, StepRecord
from marlaas_api.names import train_group
from marlaas_worker.trainer import assignment
from marlaas_worker.trainer.commit import AgentLease, PolicyKey, VersionContents

pytestmark = pytest.mark.slow

AGENTS = ("solver", "verifier")
Disturb = Callable[[PolicyKey, AgentLease], Awaitable[None]]


def team(
    environment: str = "teams:at_once", frozen: str = "", args: Mapping[str, str] | None = None, **training: int
) -> JobDocument:
    """A job of two agents on tasks that all train something."""
    job = document("team", environment=environment, maxRefill=0)
    (agent,) = job.spec.agents
    agents = tuple(agent.model_copy(update={"name": name, "trainable": name != frozen}) for name in AGENTS)
    played = job.spec.environment.model_copy(update={"args": dict(args or {})})
    settings = job.spec.training.model_copy(update=training)
    spec = job.spec.model_copy(update={"agents": agents, "environment": played, "training": settings})
    return job.model_copy(update={"spec": spec})


async def run(
    model: Path, folder: Path, job: JobDocument, kill: Mapping[str, int] | None = None
) -> tuple[dict[str, list[str]], list[StepRecord], list[str]]:
    """Run a job, with one kill at each of some failpoints; return each agent's weights of all versions, the steps, and where roles were killed."""
    async with Loop(model, folder) as loop:
        killed = kill_at_each(kill or {})
        await loop.submit(job)
        level = await loop.finished(job, 120)
        assert level.phase is Phase.SUCCEEDED, f"{level.reason}: {level.message}"
        assert bool(loop.deaths) == bool(killed)
        return await weights_of(loop, job), await loop.steps(job), killed


@pytest.fixture(autouse=True)
def _teams(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))


@pytest.fixture(scope="session")
def undisturbed(tiny_model, tmp_path_factory):
    """What a run gives when nothing happens to it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(Path(__file__).parent))
        return asyncio.run(run(tiny_model, tmp_path_factory.mktemp("undisturbed"), team()))


async def test_agents_that_speak_at_the_same_time_give_the_same_adapters_twice(tiny_model, tmp_path, undisturbed):
    weights, steps, _ = await run(tiny_model, tmp_path, team())
    assert weights == undisturbed[0]
    assert [len(set(versions)) for versions in weights.values()] == [3, 3], "every step changed both"
    assert [step.agents.keys() for step in steps] == [set(AGENTS)] * 2


async def test_an_async_environment_gives_the_same_adapters_as_its_twin_in_threads(tiny_model, tmp_path, undisturbed):
    weights, _, _ = await run(tiny_model, tmp_path, team("teams:in_tasks"))
    assert weights == undisturbed[0]


SEAMS = {
    "trainer": {
        "trainer.bind.after_set": 2,
        "trainer.commit.before_blobs": 3,
        "trainer.commit.after_blobs": 3,
        "trainer.commit.after_manifest": 3,
        "trainer.commit.after_set": 3,
        "trainer.commit.after_acks": 2,
    },
    "orchestrator": {
        "orchestrator.admit.after_level": 1,
        "orchestrator.issue.after_ledger": 2,
        "orchestrator.issue.after_task": 3,
        "orchestrator.assign.after_log": 3,
        "orchestrator.record.after_step": 1,
        "orchestrator.forget.after_groups": 1,
    },
    "rollout, sandbox, and the orchestrator at its purge": {
        "rollout.record.before_publish": 20,
        "rollout.record.after_publish": 40,
        "sandbox.episode.after_publish": 1,
        "sandbox.task.before_ack": 2,
        "orchestrator.forget.after_turns": 1,
    },
}
"""Failpoints, and which pass is killed. The first two passes of a commit are versions 0 of both agents; the next ones are steps."""
ASYNCHRONOUS = (
    SEAMS["trainer"] | SEAMS["orchestrator"] | {"sandbox.episode.after_publish": 1, "sandbox.task.before_ack": 2}
)
"""For an asynchronous job. Of an engine, which needs longest to start again, the other test has the kills."""


@pytest.mark.parametrize("role", SEAMS)
async def test_killed_at_every_seam_of_a_role_and_resumed_both_adapters_are_the_same(
    tiny_model, tmp_path, undisturbed, role
):
    weights, steps, killed = await run(tiny_model, tmp_path, team(), SEAMS[role])
    assert sorted(killed) == sorted(SEAMS[role])
    assert weights == undisturbed[0]
    assert [step.indices for step in steps] == [step.indices for step in undisturbed[1]]
    trained = [{name: used.trained_tokens for name, used in step.usage.items()} for step in steps]
    assert trained == [{name: used.trained_tokens for name, used in step.usage.items()} for step in undisturbed[1]]


async def test_each_agents_step_in_micro_batches_is_its_step_in_one_batch(tiny_model, tmp_path, undisturbed):
    """The first step, which samples the same tokens. Its sums differ in rounding only."""
    job, whole = team(steps=1, microbatch_tokens=64), undisturbed[1][0]
    _, (parts,), _ = await run(tiny_model, tmp_path, job)
    for name in AGENTS:
        assert parts.metrics[f"{name}/microbatches"] > whole.metrics[f"{name}/microbatches"] == 1
        for metric in ("tokens", "loss", "grad_norm"):
            expected = pytest.approx(whole.metrics[f"{name}/{metric}"], rel=1e-4, abs=1e-6)
            assert parts.metrics[f"{name}/{metric}"] == expected


async def test_asynchronous_agents_keep_their_staleness_and_the_ledger_is_exact_although_roles_are_killed(
    tiny_model, tmp_path, monkeypatch
):
    """Each agent's first step is committed once a group of the second one plays the version before it."""
    job, commit = team("teams:once", steps=3, max_staleness=1), PolicyKey.commit
    async with Loop(tiny_model, tmp_path) as loop, published(loop) as (turns, episodes):

        async def late(policy: PolicyKey, lease: AgentLease, contents: VersionContents) -> AgentLease:
            if contents.result.step == 0:
                of = job.namespace, job.job, policy._assignment.agent.name
                key = subjects.pin_key(*of, train_group(job.ref, 2))
                await loop.wait_for(Pin, subjects.PINS, key, lambda pin: pin.version == 0)
            return await commit(policy, lease, contents)

        monkeypatch.setattr(PolicyKey, "commit", late)
        killed = kill_at_each(ASYNCHRONOUS)
        await loop.submit(job)
        level = await loop.finished(job, 120)
        steps, versions = await loop.steps(job), {name: (await loop.history(job, name))[::-1] for name in AGENTS}
        said = [await wire.unpack(data, loop.blobs) for data in turns]
        played = [wire.decode_as(Episode, data) for _, data in sorted(episodes.items())]
    assert (level.phase, sorted(killed)) == (Phase.SUCCEEDED, sorted(ASYNCHRONOUS)), level.message
    assert ([step.step for step in steps], [step.staleness_max for step in steps][:2]) == ([0, 1, 2], [0, 1])
    assert steps[2].staleness_max <= 1
    indices = [index for step in steps for index in step.indices]
    assert sorted(indices) == list(range(len(indices)))
    for name, manifests in versions.items():
        parts = [step.agents[name] for step in steps]
        assert parts[1].staleness_mean > 0
        assert [part.version for part in parts] == [manifest.version for manifest in manifests[1:]] == [1, 2, 3]
        assert [manifest.step for manifest in manifests[1:]] == [0, 1, 2], "every step is closed once for it"
        assert [part.num_groups for part in parts] == [len(manifest.consumed) for manifest in manifests[1:]]
        consumed = [group for manifest in manifests for group in manifest.consumed]
        assert len(set(consumed)) == len(consumed) <= len(indices), "no group is trained twice"
        recorded = Recorded(name, [turn for turn in said if turn.agent == name], played)
        recorded.check(level.usage[name], steps, consumed, job.spec.rollout.group_size)
        assert recorded.num_tokens > 0


@asynccontextmanager
async def published(loop: Loop) -> AsyncIterator[tuple[list[bytes], dict[int, bytes]]]:
    """Keep all turns, and all episodes that are stored, by sequence, before the orchestrator purges them."""
    turns, episodes = list[bytes](), dict[int, bytes]()

    async def hear(turn: Request) -> None:
        turns.append(turn.data)

    async def read(_: Request) -> None:
        """Read the stream, which drops a second play of a member although it is published."""
        for stored in await loop.bus.replay(subjects.EPISODES, "episode.>"):
            episodes[stored.sequence] = stored.data

    async with loop.bus.listen("turn.>", hear), loop.bus.listen("episode.>", read):
        yield turns, episodes


@pytest.fixture
def at_the_first_steps_commit(monkeypatch: pytest.MonkeyPatch) -> Callable[[Disturb], None]:
    """Call a function when `trainer-1` is about to commit the first step of its agent, once."""

    def set_up(disturb: Disturb) -> None:
        commit, called = PolicyKey.commit, list[str]()

        async def disturbed(policy: PolicyKey, lease: AgentLease, contents: VersionContents) -> AgentLease:
            if (lease.record.holder, lease.record.version) == ("trainer-1", 0) and not called:
                called.append(policy._assignment.policy_key)
                await disturb(policy, lease)
            return await commit(policy, lease, contents)

        monkeypatch.setattr(PolicyKey, "commit", disturbed)

    return set_up


def trainers_of(history: list[Manifest]) -> list[str]:
    """Who committed the versions, the oldest first."""
    return [manifest.trainer for manifest in history[::-1]]


async def run_with_two_trainers(
    loop: Loop, expected: dict[str, list[str]], until: Callable[[], Awaitable[None]]
) -> dict[str, list[str]]:
    """Run the team, and return who committed each agent's versions; `until` waits for the disturbance."""
    job = team()
    await loop.submit(job)
    await until()
    level = await loop.finished(job, 120)
    assert level.phase is Phase.SUCCEEDED, f"{level.reason}: {level.message}"
    histories = {agent.name: await loop.history(job, agent.name) for agent in job.spec.agents}
    assert await weights_of(loop, job) == expected
    return {name: trainers_of(history) for name, history in histories.items()}


@pytest.mark.parametrize("is_killed", [False, True], ids=["leaves", "is killed"])
async def test_the_agent_of_a_trainer_that_ends_within_a_step_is_continued_by_the_other_one(
    tiny_model, tmp_path, undisturbed, at_the_first_steps_commit, monkeypatch, is_killed
):
    monkeypatch.setattr(assignment, "GRACE_S", 0.5)
    async with Loop(tiny_model, tmp_path, trainers=2) as loop:

        async def end(policy: PolicyKey, lease: AgentLease) -> None:
            loop.stop("trainer-1")
            if is_killed:
                raise Killed("trainer-1")
            await asyncio.Event().wait()  # until it is cancelled

        async def ended() -> None:
            await loop.ended("trainer-1")
            if is_killed:  # its lease is released by nobody, and its report expires
                await (await loop.bus.bucket(subjects.REPLICAS)).delete("trainer.tiny.trainer-1")

        at_the_first_steps_commit(end)
        trainers = await run_with_two_trainers(loop, undisturbed[0], ended)
        assert sorted(trainers.values()) == [["trainer-0"] * 3, ["trainer-1", "trainer-0", "trainer-0"]]
        assert loop.deaths == (["trainer-1"] if is_killed else [])


async def test_a_trainer_that_loses_the_lease_of_one_agent_within_a_step_commits_nothing_of_it(
    tiny_model, tmp_path, undisturbed, at_the_first_steps_commit
):
    lost = asyncio.Event()

    async def lose(policy: PolicyKey, lease: AgentLease) -> None:
        """Another trainer binds the agent, and releases it."""
        record = lease.record.model_copy(update={"epoch": lease.record.epoch + 1, "holder": ""})
        await policy._bucket.update(policy._assignment.policy_key, wire.encode(record), lease.revision)
        lost.set()

    async def is_lost() -> None:
        await lost.wait()

    at_the_first_steps_commit(lose)
    async with Loop(tiny_model, tmp_path, trainers=2) as loop:
        trainers = await run_with_two_trainers(loop, undisturbed[0], is_lost)
        assert {names[0] for names in trainers.values()} == {"trainer-0", "trainer-1"}
        (agent,) = (name for name, names in trainers.items() if names[0] == "trainer-1")
        epochs = {name: (await loop.record(team(), name)).epoch for name in AGENTS}
        assert epochs[agent] >= 2
        assert epochs[agent] > min(epochs.values())


@pytest.mark.parametrize("speaker", AGENTS)
async def test_an_agent_learns_the_same_bits_as_in_a_job_of_its_own(tiny_model, tmp_path, undisturbed, speaker):
    """Both speak in every episode, independently. The other one is frozen and silent in the job that it is compared with."""
    (other,) = set(AGENTS) - {speaker}
    weights, _, _ = await run(tiny_model, tmp_path, team("teams:Alone", other, {"speaker": speaker}))
    assert weights[speaker] == undisturbed[0][speaker]
