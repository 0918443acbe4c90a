"""Users of the bus: their keys, tokens and permissions, and what a real server makes of them."""

import asyncio
import contextlib
import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.tables import rows

from marlaas_api import bus_users, subjects
from marlaas_api.bus import Bus, BusRefused, BusUnavailable
from marlaas_api.bus_nats import NatsBus, connect
from marlaas_api.bus_nats.dial import Dial
from marlaas_api.bus_nats.link import Link
from marlaas_api.bus_users.accounts import SERVICES
from marlaas_api.bus_users.tokens import claims_of, credentials_text, signed
from marlaas_api.errors import InvalidInput
from marlaas_api.nats_server import EmbeddedNats

NOW = 1_800_000_000.0
SANDBOX = bus_users.SandboxUser("team-a", "job", "u1")
EXPORTER = bus_users.ExporterUser("team-a", "job", "u1")
POOLS = bus_users.RolloutUser("tiny"), bus_users.TrainerUser("tiny")
PLATFORM = (bus_users.OperatorUser(), bus_users.OrchestratorUser(), bus_users.RunnerUser(), *POOLS)


@pytest.fixture(scope="module")
def keys() -> bus_users.BusKeys:
    return bus_users.BusKeys.make()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, keys: bus_users.BusKeys) -> Iterator[EmbeddedNats]:
    server = EmbeddedNats(tmp_path_factory.mktemp("nats"), extra_config=bus_users.server_config(keys))
    asyncio.run(server.start())
    yield server
    asyncio.run(server.stop())


def creds(folder: Path, keys: bus_users.BusKeys, user: bus_users.BusUser, now: float | None = None) -> Path:
    path = folder / f"{user.identity}.creds"
    path.write_text(bus_users.mint(keys, user, time.time() if now is None else now))
    return path


def write_brief(path: Path, keys: bus_users.BusKeys, user: bus_users.BusUser, seconds: int) -> None:
    """Write credentials as `mint` makes them, but for when they expire."""
    made = bus_users.read_credentials(bus_users.mint(keys, user, time.time()))
    claims = {**claims_of(made.token), "exp": int(time.time()) + seconds}
    signing = keys.sandboxes if isinstance(user, bus_users.SandboxUser) else keys.platform
    path.write_text(credentials_text(signed(claims, signing), made.seed))


async def briefly(server: EmbeddedNats, keys: bus_users.BusKeys, user: bus_users.BusUser, path: Path) -> NatsBus:
    """A connection with a token that expires soon, however long the connection takes."""
    for seconds in (2, 4, 8, 16, 32, 64):
        write_brief(path, keys, user, seconds)
        link = Link(Dial(server.url, user.identity, path, answer_s=0.5))
        with contextlib.suppress(BusRefused):
            await link.open(60)
            return NatsBus(link)
    raise AssertionError("no connection is made within a minute")


# Keys and tokens


def test_keys_are_taken_up_as_they_were_dumped_and_broken_ones_are_refused_without_being_shown(keys):
    again = bus_users.BusKeys.load(json.loads(json.dumps(keys.dump())))
    assert again == keys
    assert bus_users.server_config(again) == bus_users.server_config(keys)
    with pytest.raises(bus_users.KeyInvalid, match="platform"):
        bus_users.BusKeys.load({name: seed for name, seed in keys.dump().items() if name != "platform"})
    with pytest.raises(bus_users.KeyInvalid) as refused:
        bus_users.BusKeys.load({**keys.dump(), "sandboxes": keys.operator})
    made = bus_users.read_credentials(bus_users.mint(keys, SANDBOX, NOW))
    for text in (bus_users.server_config(keys), repr(keys), repr(made), f"{keys}", str(refused.value)):
        assert not any(seed in text for seed in (*keys.dump().values(), made.seed))


@pytest.mark.parametrize("user", [*PLATFORM, SANDBOX, EXPORTER])
def test_credentials_are_the_same_within_a_window_new_in_the_next_and_outlive_their_renewal_by_far(keys, user):
    first, end = bus_users.mint(keys, user, NOW), bus_users.renew_at(user, NOW)
    assert bus_users.mint(keys, user, end - 1) == first
    assert bus_users.mint(keys, user, end) != first
    assert bus_users.renew_at(user, end) > end
    expires_at = bus_users.read_credentials(first).expires_at
    assert expires_at - end >= 18 * 3600


def test_two_users_share_neither_seed_nor_inbox(keys):
    sandbox = bus_users.SandboxUser
    others = sandbox("team-a", "job", "u2"), sandbox("team", "a-job", "u1"), bus_users.RolloutUser("other")
    users = (*PLATFORM, SANDBOX, EXPORTER, *others)
    made = [bus_users.read_credentials(bus_users.mint(keys, user, NOW)) for user in users]
    assert len({one.seed for one in made}) == len(made)
    assert len({bus_users.inbox_prefix(user) for user in users}) == len(users) - 1, "u1 and u2 are of one job"
    assert all(one.inboxes == (bus_users.inbox_prefix(user),) for one, user in zip(made, users, strict=True))


def test_an_answer_goes_to_an_inbox_of_the_job_or_to_one_that_nats_made():
    for reply in ("_INBOX_team-a_job.x", "_INBOX.x", "_R_.x"):
        assert subjects.is_reply_of("team-a", "job", reply)
    for reply in ("_INBOX_team-a_job-2.x", "_INBOX_team-a_jo.x", "_INBOX__rollout_tiny.x", "task.team-a.job"):
        assert not subjects.is_reply_of("team-a", "job", reply)


@pytest.mark.parametrize("names", [["*", "job", "u"], ["team-a", ">", "u"], ["a.b", "c", "u"], ["*"]])
def test_a_name_that_would_grant_more_than_one_is_refused(keys, names):
    user = bus_users.SandboxUser(*names) if len(names) == 3 else bus_users.RolloutUser(*names)
    with pytest.raises(InvalidInput, match="not a DNS label"):
        bus_users.mint(keys, user, NOW)


@pytest.mark.parametrize(("user", "table"), [(SANDBOX, "sandbox_may"), (EXPORTER, "exporter_may")])
def test_a_pod_of_a_tenant_may_do_these_things_and_nothing_else(user, table):
    may = bus_users.permissions(user)
    assert may.subscribe == (f"{bus_users.inbox_prefix(user)}.>",)
    assert may.publish == tuple(rows(__file__, table))
    left = {service.subject for service in SERVICES}
    assert left == {*rows(__file__, "services")}, "no other subject leaves the sandboxes' account"


@pytest.mark.parametrize("user", PLATFORM)
def test_no_role_of_the_platform_may_do_everything(user):
    may = bus_users.permissions(user)
    for subject in (">", "$JS.>", "$JS.API.>", "$SYS.>", "$KV.>", "_INBOX.>"):
        assert subject not in (*may.publish, *may.subscribe)
    assert not any("STREAM.DELETE" in subject or "MSG.DELETE" in subject for subject in may.publish)


# On a real server


async def test_without_valid_credentials_nobody_gets_in_and_is_told_why(server, keys, tmp_path):
    with pytest.raises(BusRefused, match="rejects nobody"):
        await connect(server.url, name="nobody")
    path = creds(tmp_path, bus_users.BusKeys.make(), SANDBOX)
    foreign = r"sandbox\.team-a\.job\.u1.*are not signed with this server's keys.*get new credentials"
    with pytest.raises(BusRefused, match=foreign):
        await connect(server.url, name="x", creds=path)
    path = creds(tmp_path, keys, SANDBOX, now=NOW - 800_000_000)
    with pytest.raises(BusRefused, match=r"expired at 20.*renews them") as refused:
        await connect(server.url, name="x", creds=path)
    assert bus_users.read_credentials(path.read_text()).seed not in str(refused.value)
    path.write_text("hello")
    with pytest.raises(BusRefused, match=rf"{path} cannot be used: it is not a NATS credentials file"):
        await connect(server.url, name="x", creds=path)


@pytest.mark.processes
async def test_an_expiring_token_is_renewed_without_losing_anything(server, keys, tmp_path, caplog):
    owner = await connect(server.url, name="owner", creds=creds(tmp_path, keys, bus_users.OrchestratorUser()))
    await owner.ensure()
    consumer, task = subjects.consumer("team-a", "job", "sandbox"), subjects.task("team-a", "job")
    again_s = 1.0  # a delivery that is lost with the connection comes again after that
    await owner.consumer(subjects.TASKS, consumer, task, ack_wait_s=again_s)
    path = tmp_path / "sandbox.creds"
    sandbox = await briefly(server, keys, SANDBOX, path)
    write_brief(path, keys, SANDBOX, 3600)
    claims = await sandbox.claims(subjects.TASKS, consumer, ack_wait_s=again_s)
    number = 0
    while sandbox.num_breaks == 0 or number % 2:
        await owner.publish(task, b"%d" % number, message_id=f"t{number}")
        while await owner.replay(subjects.TASKS, task):
            await work(sandbox, claims)
        number += 1
    found = await owner.replay(subjects.EPISODES, subjects.episode("team-a", "job"))
    assert [stored.data for stored in found] == [b"%d" % n for n in range(number)]
    for secret in (*keys.dump().values(), path.read_text(), bus_users.read_credentials(path.read_text()).seed):
        assert secret not in caplog.text
    for bus in (sandbox, owner):
        await bus.close()


async def work(sandbox: Bus, claims) -> None:  # type: ignore[no-untyped-def]
    """As a sandbox does: what is Retryable is tried again, and a task that is not settled comes again."""
    with contextlib.suppress(BusUnavailable):
        for delivery in await claims.fetch(1, 1.0):
            data = delivery.stored.data
            await sandbox.publish(subjects.episode("team-a", "job"), data, message_id=f"e{data.decode()}")
            await delivery.ack()
