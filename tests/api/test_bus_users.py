"""Users of the bus: their keys, tokens and permissions, and what a real server makes of them."""

import asyncio
import json
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from marlaas_api import subjects
from marlaas_api.bus import Bus, BusRefused, BusUnavailable
from marlaas_api.bus_nats import connect
from marlaas_api.bus_users import (
    BusKeys,
    BusUser,
    CredentialsInvalid,
    KeyInvalid,
    OperatorUser,
    OrchestratorUser,
    RolloutUser,
    RunnerUser,
    SandboxUser,
    TrainerUser,
    inbox_prefix,
    mint,
    permissions,
    read_credentials,
    renew_at,
    server_config,
)
from marlaas_api.bus_users.tokens import claims_of, credentials_text, signed
from marlaas_api.errors import InvalidInput
from marlaas_api.nats_server import EmbeddedNats

NOW = 1_800_000_000.0
SANDBOX = SandboxUser("team-a", "job", "u1")
USERS: tuple[BusUser, ...] = (
    OperatorUser(),
    OrchestratorUser(),
    RolloutUser("tiny"),
    TrainerUser("tiny"),
    RunnerUser(),
    SANDBOX,
)


@pytest.fixture
def keys() -> BusKeys:
    return BusKeys.make()


@pytest.fixture
async def server(tmp_path: Path, keys: BusKeys) -> AsyncIterator[EmbeddedNats]:
    async with EmbeddedNats(tmp_path / "nats", extra_config=server_config(keys)) as server:
        yield server


def creds(folder: Path, keys: BusKeys, user: BusUser, now: float | None = None) -> Path:
    path = folder / f"{user.identity}.creds"
    path.write_text(mint(keys, user, time.time() if now is None else now))
    return path


def brief(keys: BusKeys, user: BusUser, seconds: int) -> str:
    """Credentials as `mint` makes them, but for when they expire."""
    made = read_credentials(mint(keys, user, time.time()))
    claims = {**claims_of(made.token), "exp": int(time.time()) + seconds}
    return credentials_text(
        signed(claims, keys.sandboxes if isinstance(user, SandboxUser) else keys.platform), made.seed
    )


async def soon(awaitable):  # type: ignore[no-untyped-def]
    return await asyncio.wait_for(awaitable, 20)


# Keys and tokens


def test_keys_are_taken_up_as_they_were_dumped(keys: BusKeys) -> None:
    again = BusKeys.load(json.loads(json.dumps(keys.dump())))
    assert again == keys
    assert server_config(again) == server_config(keys)


def test_keys_that_are_broken_or_incomplete_are_refused_without_being_shown(keys: BusKeys) -> None:
    with pytest.raises(KeyInvalid, match="platform"):
        BusKeys.load({name: seed for name, seed in keys.dump().items() if name != "platform"})
    with pytest.raises(KeyInvalid) as refused:
        BusKeys.load({**keys.dump(), "sandboxes": keys.operator})
    assert keys.operator not in str(refused.value)


def test_no_secret_is_in_the_servers_configuration_or_in_what_is_printed(keys: BusKeys) -> None:
    made = read_credentials(mint(keys, SANDBOX, NOW))
    for text in (server_config(keys), repr(keys), repr(made), f"{keys}"):
        assert not any(seed in text for seed in (*keys.dump().values(), made.seed))


@pytest.mark.parametrize("user", USERS)
def test_credentials_are_the_same_within_a_window_and_new_in_the_next(keys: BusKeys, user: BusUser) -> None:
    first, end = mint(keys, user, NOW), renew_at(user, NOW)
    assert mint(keys, user, end - 1) == first
    assert mint(keys, user, end) != first
    assert renew_at(user, end) > end


@pytest.mark.parametrize("user", USERS)
def test_credentials_outlive_the_time_of_their_renewal_by_far(keys: BusKeys, user: BusUser) -> None:
    expires_at = read_credentials(mint(keys, user, NOW)).expires_at
    assert expires_at is not None
    assert expires_at - renew_at(user, NOW) >= 18 * 3600


def test_two_users_share_neither_seed_nor_inbox(keys: BusKeys) -> None:
    others = (SandboxUser("team-a", "job", "u2"), SandboxUser("team", "a-job", "u1"), RolloutUser("other"))
    made = [read_credentials(mint(keys, user, NOW)) for user in (*USERS, *others)]
    assert len({one.seed for one in made}) == len(made)
    assert len({inbox_prefix(user) for user in (*USERS, others[1], others[2])}) == len(USERS) + 2
    assert all(one.inboxes == (inbox_prefix(user),) for one, user in zip(made, (*USERS, *others), strict=True))


@pytest.mark.parametrize(
    "user",
    [SandboxUser("*", "job", "u"), SandboxUser("team-a", ">", "u"), SandboxUser("a.b", "c", "u"), RolloutUser("*")],
)
def test_a_name_that_would_grant_more_than_one_is_refused(keys: BusKeys, user: BusUser) -> None:
    with pytest.raises(InvalidInput, match="not a DNS label"):
        mint(keys, user, NOW)


def test_a_sandbox_may_do_these_things_and_nothing_else() -> None:
    may = permissions(SANDBOX)
    assert may.subscribe == ("_INBOX_team-a_job.>",)
    assert may.publish == (
        "gen.team-a.job.*",
        "episode.team-a.job",
        "$JS.API.CONSUMER.MSG.NEXT.TASKS.team-a_job_sandbox",
        "$JS.ACK.TASKS.team-a_job_sandbox.>",
        "$JS.API.DIRECT.GET.KV_jobs.$KV.jobs.team-a.job",
    )


@pytest.mark.parametrize("user", [user for user in USERS if user != SANDBOX])
def test_no_role_of_the_platform_may_do_everything(user: BusUser) -> None:
    may = permissions(user)
    for subject in (">", "$JS.>", "$JS.API.>", "$SYS.>", "$KV.>", "_INBOX.>"):
        assert subject not in (*may.publish, *may.subscribe)
    assert not any("STREAM.DELETE" in subject or "MSG.DELETE" in subject for subject in may.publish)


@pytest.mark.parametrize(
    "text", ["", "not credentials", "-----BEGIN NATS USER JWT-----\nx\n------END NATS USER JWT------"]
)
def test_a_file_that_is_no_credentials_file_is_said_to_be_none(text: str) -> None:
    with pytest.raises(CredentialsInvalid, match="credentials"):
        read_credentials(text)


# On a real server


async def test_without_credentials_nobody_gets_in(server: EmbeddedNats) -> None:
    with pytest.raises(BusRefused, match="rejects nobody"):
        await soon(connect(server.url, name="nobody"))


async def test_the_keys_of_another_installation_are_refused_with_what_to_do(
    server: EmbeddedNats, tmp_path: Path
) -> None:
    path = creds(tmp_path, BusKeys.make(), SANDBOX)
    with pytest.raises(
        BusRefused, match=r"sandbox\.team-a\.job\.u1.*are not signed with this server's keys.*get new credentials"
    ):
        await soon(connect(server.url, name="x", creds=path))


async def test_expired_credentials_are_refused_with_what_to_do(
    server: EmbeddedNats, keys: BusKeys, tmp_path: Path
) -> None:
    path = creds(tmp_path, keys, SANDBOX, now=NOW - 800_000_000)
    with pytest.raises(BusRefused, match=r"expired at 20.*renews them") as refused:
        await soon(connect(server.url, name="x", creds=path))
    assert read_credentials(path.read_text()).seed not in str(refused.value)


async def test_a_file_that_is_not_credentials_is_refused_by_name(server: EmbeddedNats, tmp_path: Path) -> None:
    path = tmp_path / "user.creds"
    path.write_text("hello")
    with pytest.raises(BusRefused, match=rf"{path} cannot be used: it is not a NATS credentials file"):
        await soon(connect(server.url, name="x", creds=path))


async def test_new_keys_for_an_old_store_lose_nothing(tmp_path: Path) -> None:
    for round_ in range(2):
        keys = BusKeys.make()
        async with EmbeddedNats(tmp_path / "nats", extra_config=server_config(keys)) as server:
            runner = await connect(server.url, name="runner", creds=creds(tmp_path, keys, RunnerUser()))
            await runner.ensure()
            jobs = await runner.bucket(subjects.JOBS)
            assert len(await jobs.entries()) == round_
            await jobs.put("team-a.job", b"1")
            await runner.close()


async def test_an_expiring_token_is_renewed_without_losing_anything(
    server: EmbeddedNats, keys: BusKeys, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    owner = await connect(server.url, name="owner", creds=creds(tmp_path, keys, OrchestratorUser()))
    await owner.ensure()
    consumer = subjects.consumer("team-a", "job", "sandbox")
    again_s = subjects.TASK_ACK_WAIT_S  # a delivery that is lost with the connection comes again after that
    await owner.consumer(subjects.TASKS, consumer, subjects.task("team-a", "job"), ack_wait_s=again_s)
    path = tmp_path / "sandbox.creds"
    path.write_text(brief(keys, SANDBOX, 2))
    sandbox = await connect(server.url, name="sandbox-0", creds=path)
    path.write_text(brief(keys, SANDBOX, 3600))
    claims = await sandbox.claims(subjects.TASKS, consumer, ack_wait_s=again_s)
    number = 0
    while sandbox.num_breaks == 0 or number % 2:
        await owner.publish(subjects.task("team-a", "job"), b"%d" % number, message_id=f"t{number}")
        (delivery,) = await asyncio.wait_for(one(claims), 60)
        await persist(sandbox, subjects.episode("team-a", "job"), delivery.stored.data)
        await delivery.ack()
        number += 1
    found = await owner.replay(subjects.EPISODES, subjects.episode("team-a", "job"))
    assert [stored.data for stored in found] == [b"%d" % n for n in range(number)]
    assert await owner.replay(subjects.TASKS, subjects.task("team-a", "job")) == []
    assert sandbox.num_breaks == 1
    for text in (path.read_text(), *keys.dump().values()):
        assert read_credentials(path.read_text()).seed not in caplog.text
        assert text not in caplog.text
    for bus in (sandbox, owner):
        await bus.close()


async def one(claims):  # type: ignore[no-untyped-def]
    while not (deliveries := await claims.fetch(1, 1.0)):
        pass
    return deliveries


async def persist(bus: Bus, subject: str, data: bytes) -> None:
    """As a sandbox does: what is Retryable is tried again."""
    while True:
        try:
            await bus.publish(subject, data, message_id=f"e{data.decode()}")
            return
        except BusUnavailable:
            continue


async def test_who_is_not_renewed_in_time_is_told_why_and_goes_on_once_it_is(
    server: EmbeddedNats, keys: BusKeys, tmp_path: Path
) -> None:
    owner = await connect(server.url, name="owner", creds=creds(tmp_path, keys, OrchestratorUser()))
    await owner.ensure()
    await owner.close()
    path = tmp_path / "runner.creds"
    path.write_text(brief(keys, RunnerUser(), 2))
    runner = await connect(server.url, name="runner", creds=path)
    jobs = await runner.bucket(subjects.JOBS)
    while runner.num_breaks == 0:
        await persist_key(jobs)
    with pytest.raises(BusUnavailable, match=r"rejects runner.*expired at"):
        await soon(jobs.put("team-a.job", b"late"))
    path.write_text(mint(keys, RunnerUser(), time.time()))
    await soon(persist_key(jobs))
    await runner.close()


async def persist_key(jobs) -> None:  # type: ignore[no-untyped-def]
    try:
        await jobs.put("team-a.job", b"1")
    except BusUnavailable:
        await asyncio.sleep(0.01)
    else:
        await asyncio.sleep(0.01)
