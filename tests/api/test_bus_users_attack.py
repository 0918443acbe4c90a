"""A sandbox's credential in the hands of an attacker: every verb, on everything that is not its job's, on a real nats-server.

Two jobs in two namespaces and the platform's own traffic. The attacker speaks the raw protocol through nats-py, so nothing of ours stands
between it and the server. A try counts as refused when the server says so (the error callback hears of it) and nothing has changed; what
no permission forbids (where an answer is wanted) must have no effect.
"""

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import nats
import pytest
from tests.api.attacks import JOBS, MINE, OTHER, OWN, STORED, acks, api_calls, consumer, targets, wildcards

from marlaas_api import subjects
from marlaas_api.bus import Bus, Request
from marlaas_api.bus_memory.stream import matches
from marlaas_api.bus_nats import NatsBus, connect
from marlaas_api.bus_users import (
    BusKeys,
    BusUser,
    ExporterUser,
    OperatorUser,
    OrchestratorUser,
    RolloutUser,
    RunnerUser,
    SandboxUser,
    TrainerUser,
    inbox_prefix,
    mint,
    permissions,
    server_config,
)
from marlaas_api.nats_server import EmbeddedNats
from marlaas_api.retries import patiently


@dataclass
class BusHarness:
    """A server with jobs on it, and its platform's connections."""

    server: EmbeddedNats
    keys: BusKeys
    folder: Path
    owner: NatsBus

    def creds(self, user: BusUser) -> Path:
        path = self.folder / f"{user.identity}.creds"
        path.write_text(mint(self.keys, user, time.time()))
        return path

    async def connect(self, user: BusUser) -> NatsBus:
        return await connect(self.server.url, name=user.identity, creds=self.creds(user))

    async def state(self) -> dict[str, Any]:
        """What there is on the server: every stream's messages by subject, its configuration and its consumers."""
        admin = self.owner._jetstream
        found: dict[str, Any] = {}
        for stream in STORED:
            info = await admin.api(f"STREAM.INFO.{stream}", "look", {"subjects_filter": ">"})
            state, names = info["state"], ("messages", "last_seq", "subjects", "consumer_count")
            found[stream] = (info["config"], *(state.get(name) for name in names))
        for user in JOBS:
            info = await admin.api(f"CONSUMER.INFO.{subjects.TASKS}.{consumer(user)}", "look")
            position = info["delivered"]["stream_seq"], info["num_ack_pending"], info["ack_floor"]["stream_seq"]
            found[consumer(user)] = (info["config"], *position)
        return found


async def settle_down(owner: Bus, user: SandboxUser) -> None:
    """What an admitted job has on the bus."""
    ns, job = user.namespace, user.job
    await owner.consumer(subjects.TASKS, consumer(user), subjects.task(ns, job), ack_wait_s=60)
    await owner.consumer(subjects.EPISODES, consumer(user, "orchestrator"), subjects.episode(ns, job))
    for number in range(3):
        await owner.publish(subjects.task(ns, job), b"task %d" % number)
    for bucket in (subjects.JOBS, subjects.PROGRESS):
        await (await owner.bucket(bucket)).put(subjects.job_key(ns, job), f"{bucket} of {job}".encode())
    await (await owner.bucket(subjects.POLICY)).put(subjects.policy_key(ns, job, "policy"), b"policy")


@pytest.fixture
async def harness(tmp_path: Path) -> AsyncIterator[BusHarness]:
    keys = BusKeys.make()
    async with EmbeddedNats(tmp_path / "nats", extra_config=server_config(keys)) as server:
        path = tmp_path / "owner.creds"
        path.write_text(mint(keys, OrchestratorUser(), time.time()))
        owner = await connect(server.url, name="owner", creds=path)
        harness = BusHarness(server, keys, tmp_path, owner)
        for call in (owner.ensure, *(partial(settle_down, owner, user) for user in JOBS)):
            await patiently(call, "set-up", 0.1)  # on a loaded machine an answer may come too late
        yield harness
        await owner.close()


pytestmark = pytest.mark.processes


class Attacker:
    """A sandbox's credential on a bare connection. `tried` and `refused`: the subjects, in lower case, as nats-py quotes the server."""

    def __init__(self, client: Any, refused: Counter[str]) -> None:
        self.client, self.refused, self.inbox = client, refused, client.new_inbox()
        self.got: list[Any] = []
        self.tried: Counter[str] = Counter()

    async def hear(self, message: Any) -> None:
        self.got.append(message)

    async def publish(self, subject: str, body: bytes = b"x", reply: str = "", headers=None) -> None:
        self.tried[subject.lower()] += 1
        await self.client.publish(subject, body, reply=reply, headers=headers)

    async def subscribe(self, subject: str, queue: str = "") -> None:
        self.tried[subject.lower()] += 1
        await self.client.subscribe(subject, queue=queue, cb=self.hear)

    async def until(self, condition: Callable[[], bool]) -> None:
        """Refusals come in their own time; a round trip after the last try they are all there."""
        async with asyncio.timeout(300):
            await self.client.flush(60)
            while not condition():
                await self.client.flush(60)
                await asyncio.sleep(0.01)


@pytest.fixture
async def attacker(harness: BusHarness, request: pytest.FixtureRequest) -> AsyncIterator[Attacker]:
    refused: Counter[str] = Counter()
    user = getattr(request, "param", MINE)

    async def on_error(error: Exception) -> None:
        text = str(error)
        assert "permissions violation" in text, text
        refused[text.split('"')[1]] += 1

    login = {"user_credentials": str(harness.creds(user)), "inbox_prefix": inbox_prefix(user), "error_cb": on_error}
    options = {"allow_reconnect": False, "skip_subject_validation": True}
    client = await nats.connect(harness.server.url, **login, **options)
    made = Attacker(client, refused)
    await client.subscribe(made.inbox, cb=made.hear)
    await client.flush()
    yield made
    assert not client.is_closed, "the server hung up on what it should have refused"
    await client.close()


@pytest.mark.parametrize(("attacker", "own"), OWN.items(), indirect=["attacker"])
async def test_every_verb_on_everything_of_others_is_refused(harness, attacker, own):
    before, inbox = await harness.state(), attacker.inbox
    removal = {"KV-Operation": "PURGE", "Nats-Rollup": "sub"}
    for subject in targets(own):
        for headers in (None, removal, {"KV-Operation": "DEL"}, {"Nats-Msg-Id": "u2-t0-0"}, {"Nats-Rollup": "all"}):
            await attacker.publish(subject, b"mine now", inbox, headers)
    for subject, body in (*api_calls(), *acks()):
        await attacker.publish(subject, body, inbox)
    for subject in (*targets(own), *wildcards()):
        for queue in ("", "rollout"):
            await attacker.subscribe(subject, queue)
    for subject in own:
        await attacker.subscribe(subject)  # what it may say it may not hear
    assert attacker.tried.total() >= 1000
    await attacker.until(lambda: attacker.refused.total() >= attacker.tried.total())
    assert attacker.refused == attacker.tried
    await traffic(harness)
    assert attacker.got == []
    assert await harness.state() == await expected(harness, before)


async def traffic(harness: BusHarness) -> None:
    """The platform goes on; a subscription that was let in would hear it."""
    await harness.owner.publish(subjects.event("team-b", "other", "orchestrator"), b"secret")
    await (await harness.owner.bucket(subjects.PINS)).put("team-b.other", b"secret")


async def expected(harness: BusHarness, before: dict[str, Any]) -> dict[str, Any]:
    """The state before, with the platform's own traffic in it."""
    after = await harness.state()
    for stream in (subjects.EVENTS, f"KV_{subjects.PINS}"):
        assert after[stream][1] == before[stream][1] + 1
        before = {**before, stream: after[stream]}
    return before


async def test_no_answer_can_be_aimed_at_what_is_not_its_own(harness, attacker):
    """Reply subjects are checked by no permission. In one account with the platform, these calls purge and delete streams."""
    heard: list[Request] = []

    async def hear(request: Request) -> None:
        heard.append(request)

    rollout = await harness.connect(RolloutUser("tiny"))
    victim = await harness.connect(OTHER)
    inbox = victim.new_inbox()
    named = [call for call, _ in api_calls() if not call.endswith(">") and "*" not in call]
    aims = [*targets(OWN[MINE]), *named, "gen.team-b.other.policy", subjects.episode("team-b", "other"), inbox]
    reserved = [aim for aim in aims if aim.startswith(("_R_.", "_GR_.", "$JS.ACK."))]
    async with rollout.listen("gen.*.*.*", hear, "rollout"), victim.listen(inbox, hear):
        before = await harness.state()
        asked = f"$JS.API.CONSUMER.MSG.NEXT.TASKS.{consumer(MINE)}"
        sources = ("$JS.API.DIRECT.GET.KV_jobs.$KV.jobs.team-a.mine", asked)
        for aim in aims:
            for source in sources:
                await attacker.publish(source, b"" if "GET" in source else b'{"batch":1,"no_wait":true}', aim)
            await attacker.publish(subjects.episode("team-a", "mine"), b"twice", aim, {"Nats-Msg-Id": "once"})
        await attacker.until(lambda: attacker.refused.total() >= 3 * len(reserved))
        await traffic(harness)
        after = await harness.state()
    mine = subjects.EPISODES
    assert (after[mine][1], after[mine][3]) == (1, {subjects.episode("team-a", "mine"): 1})
    changed = (mine, consumer(MINE), subjects.EVENTS, f"KV_{subjects.PINS}")
    unchanged = {name for name in before if name not in changed}
    assert {name: after[name] for name in unchanged} == {name: before[name] for name in unchanged}
    # Its own tasks and its own document may reach the inbox of another, if it knew one: nothing that anybody takes for an answer.
    assert {request.data for request in heard if request.subject.startswith("gen.")} == set()
    for bus in (rollout, victim):
        await bus.close()


async def test_no_ack_of_its_own_consumer_settles_a_task_of_another_job(harness, attacker):
    """The stream's sequence in an ack is the sandbox's to write, and all jobs' tasks are in one work queue, which forgets what is acked."""
    asked = f"$JS.API.CONSUMER.MSG.NEXT.TASKS.{consumer(MINE)}"
    await attacker.publish(asked, b'{"batch":3,"no_wait":true}', attacker.inbox)
    await attacker.until(lambda: len(attacker.got) >= 3)
    before = await harness.state()
    last = before[subjects.TASKS][2]
    own = {int(message.reply.split(".")[5]) for message in attacker.got}
    for sequence in sorted(set(range(last + 10)) - own):
        for how in (b"+ACK", b"+TERM", b"+NXT", b"-NAK", b""):
            await attacker.publish(f"$JS.ACK.TASKS.{consumer(MINE)}.1.{sequence}.1.{time.time_ns()}.0", how)
    await attacker.client.flush(20)
    await harness.owner.publish(subjects.task("team-b", "other"), b"one more, after acks of what was to come")
    after = await harness.state()
    theirs = {subjects.task("team-b", "other"): 4, subjects.task("team-a", "sibling"): 3}
    assert {subject: number for subject, number in after[subjects.TASKS][3].items() if subject in theirs} == theirs
    for user in JOBS[1:]:
        assert after[consumer(user)] == before[consumer(user)]


async def test_what_a_sandbox_needs_it_may_do(harness):
    sandbox, rollout = await harness.connect(MINE), await harness.connect(RolloutUser("tiny"))
    answers: asyncio.Queue[bytes] = asyncio.Queue()
    replies: list[str] = []

    async def answer(request: Request) -> None:
        replies.append(request.reply)
        for part in (b"accepted", b"beat", b"result"):
            await rollout.send(request.reply, part)

    async def note(request: Request) -> None:
        await answers.put(request.data)

    inbox = sandbox.new_inbox()
    async with rollout.listen("gen.team-a.mine.policy", answer, "rollout"), sandbox.listen(inbox, note):
        await sandbox.send("gen.team-a.mine.policy", b"ask", inbox)
        assert [await asyncio.wait_for(answers.get(), 10) for _ in range(3)] == [b"accepted", b"beat", b"result"]
    assert all(reply.startswith("_R_.") for reply in replies)
    assert all(subjects.is_reply_of("team-a", "mine", reply) for reply in replies)
    claims = await sandbox.claims(subjects.TASKS, consumer(MINE))
    (first,) = await claims.fetch(1, 10)
    (second,) = await claims.fetch(1, 10)
    await first.in_progress()
    await second.nak()
    await first.ack()
    (again,) = await claims.fetch(1, 10)
    assert (first.stored.subject, again.stored.data, again.num_delivered) == ("task.team-a.mine", b"task 1", 2)
    await again.term()
    sequence = await sandbox.publish(subjects.episode("team-a", "mine"), b"episode", message_id="u1-t0-0")
    assert await sandbox.publish(subjects.episode("team-a", "mine"), b"episode", message_id="u1-t0-0") == sequence
    jobs = await sandbox.bucket(subjects.JOBS, inspected=False)
    entry = await jobs.get(subjects.job_key("team-a", "mine"))
    assert entry.data == b"jobs of mine"
    for bus in (sandbox, rollout):
        await bus.close()


@pytest.mark.parametrize("attacker", [*OWN][1:], indirect=True)
async def test_an_exporter_reads_and_reports_its_own_job_and_empties_no_report_of_others(harness, attacker):
    for user in JOBS:
        await harness.owner.publish(subjects.step(user.namespace, user.job, user.uid, 0), user.job.encode())
    operator = await (await harness.connect(OperatorUser())).bucket(subjects.EXPORTS)
    for user in ([*OWN][1], ExporterUser("team-b", "other", "u2")):
        exporter = await harness.connect(user)
        bucket = await exporter.bucket(subjects.EXPORTS, inspected=False)
        assert await bucket.put(subjects.job_key(user.namespace, user.job), user.job.encode()) > 0
        assert (await bucket.get(subjects.job_key(user.namespace, user.job))).data == user.job.encode()
        subject = subjects.step(user.namespace, user.job, user.uid, 0)
        assert (await exporter.last(subjects.STEPS, subject)).data == user.job.encode()
        assert await exporter.last(subjects.STEPS, subjects.evaluation(user.namespace, user.job, user.uid, 0)) is None
        for name in (subjects.JOBS, subjects.PROGRESS):
            read = await exporter.bucket(name, inspected=False)
            assert (await read.get(subjects.job_key(user.namespace, user.job))).data == f"{name} of {user.job}".encode()
        answers: asyncio.Queue[bytes] = asyncio.Queue()
        answer = lambda request: harness.owner.send(request.reply, b"part")  # noqa: E731
        async with harness.owner.listen(subjects.export("*", "*"), answer):
            hear = lambda request, answers=answers: answers.put(request.data)  # noqa: E731
            async with exporter.listen(inbox := exporter.new_inbox(), hear):
                await exporter.send(subjects.export(user.namespace, user.job), b"ask", inbox)
                assert await asyncio.wait_for(answers.get(), 10) == b"part"
        await exporter.close()
    for headers in ({"Nats-Rollup": "all"}, {"Nats-Rollup": "sub", "KV-Operation": "PURGE"}, {"KV-Operation": "DEL"}):
        await attacker.publish("$KV.exports.team-a.mine", b"x", attacker.inbox, headers)
    await attacker.publish("$KV.exports.team-a.mine", b"x" * (17 << 10), attacker.inbox)
    await attacker.until(lambda: len(attacker.got) == 4)
    assert [b"error" in message.data for message in attacker.got] == [True, True, False, True]
    assert [entry.data for entry in await operator.entries()] == [b"other"]


async def test_every_role_of_the_platform_may_do_its_work(harness):
    """The roles' own tests do this without permissions: claiming, compare-and-set, recording."""
    users = RolloutUser("tiny"), TrainerUser("tiny"), RunnerUser()
    rollout, trainer, runner = [await harness.connect(user) for user in users]
    await (await rollout.bucket("pins")).create("team-a.mine.policy.u1-t0", b"0")
    await (await rollout.bucket("replicas")).put("rollout.tiny.rollout-0", b"report")
    await rollout.publish(subjects.turn("team-a", "mine", "u1-t0-0-1", 0), b"turn", expect_last=0)
    await rollout.publish(subjects.event("team-a", "mine", "rollout"), b"event", message_id="told")
    assert len(await rollout.replay(subjects.TURNS, subjects.turn("team-a", "mine", "u1-t0-0-1", "*"))) == 1
    await harness.owner.publish(subjects.job_log("team-a", "mine"), b"group", expect_last=0)
    groups = await trainer.consumer(subjects.GROUPS, consumer(MINE, "policy", "trainer"), "group.team-a.mine")
    (delivery,) = await groups.fetch(1, 10)
    await delivery.ack()
    assert await trainer.last(subjects.TURNS, subjects.turn("team-a", "mine", "u1-t0-0-1", 0)) is not None
    policy = await trainer.bucket("policy")
    entry = await policy.get("team-a.mine.policy")
    await policy.update("team-a.mine.policy", b"next", entry.revision)
    await trainer.delete_consumer(subjects.GROUPS, consumer(MINE, "policy", "trainer"))
    await runner.ensure()
    reader = await runner.consumer(subjects.EPISODES, consumer(MINE, "reader"), subjects.episode("team-a", "mine"))
    assert await reader.fetch(1, 0.01) == []
    assert await harness.owner.position(subjects.EPISODES, consumer(MINE, "reader")) is not None
    assert (await harness.owner.state(subjects.TURNS)).last_sequence > 0
    await harness.owner.purge(subjects.TURNS, subjects.turn("team-a", "mine", "*", "*"), up_to=2)
    await runner.delete_consumer(subjects.EPISODES, consumer(MINE, "reader"))
    await harness.owner.purge(subjects.EPISODES, subjects.episode("team-a", "mine"))
    for bus in (rollout, trainer, runner):
        await bus.close()


async def test_a_pools_calibration_is_written_by_its_trainer_and_read_by_its_rollout_alone(harness):
    """Whoever could write it could have an engine with a wrong adapter serve."""
    key = subjects.calibration_key("tiny", "float32")
    trainer = await (await harness.connect(TrainerUser("tiny"))).bucket(subjects.CALIBRATIONS, inspected=False)
    rollout = await (await harness.connect(RolloutUser("tiny"))).bucket(subjects.CALIBRATIONS, inspected=False)
    await trainer.put(key, b"calibration")
    found = await rollout.get(key)
    assert found.data == b"calibration"
    written, asked = f"$KV.calibrations.{key}", f"$JS.API.DIRECT.GET.KV_calibrations.$KV.calibrations.{key}"
    for user in (RolloutUser("large"), TrainerUser("large"), OrchestratorUser(), RunnerUser(), MINE):
        assert not any(matches(may, subject) for may in permissions(user).publish for subject in (written, asked)), user
    assert not any(matches(granted, written) for granted in permissions(RolloutUser("tiny")).publish)
