"""The bus gateway: `Bus` over nats-py and JetStream's API (nats-server 2.11 or newer; tested with 2.15).

nats-py 2.16 connects, reconnects, parses and subscribes; only `client` imports it. Its JetStream layer
(`nats.js`) is not used, because it lacks properties that `Bus` promises. File names are those of nats-py 2.16.0:

- A request waits for its timeout when the connection breaks (aio/client.py, `_request_new_style`; nats-io/nats.c#391
  describes it for the C client). A forbidden request also does (nats-io/nats.c#740).
- Key-value writes take no message id, so they cannot be repeated after a broken connection; `purge` takes no revision,
  so it cannot be a compare-and-set (js/kv.py).
- A key-value watch recovers from a restart of the server after missed heartbeats, in 17.5 s when measured. It then
  continues behind its last message and does not read the bucket again (js/client.py, `reset_ordered_consumer`).
- A cancelled `fetch` drops the messages that it has received, until their ack wait has passed (js/client.py, `_fetch_n`).
- `nak`, `term` and `in_progress` are not confirmed by the server (aio/msg.py).
- There is no batched direct get (ADR-31), which `replay` and `entries` use.
- `StreamConfig.from_response` drops settings that it does not know (js/api.py), so an update would reset them.

The modules use JetStream's documented subjects and JSON instead.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from marlaas_api.background import background
from marlaas_api.bus import Bucket, Consumer, Position, Request, Stored, StreamState, checked_subject
from marlaas_api.bus_nats.buckets import NatsBucket
from marlaas_api.bus_nats.consumers import Durable, NatsConsumer
from marlaas_api.bus_nats.dial import Dial
from marlaas_api.bus_nats.jetstream import JetStream, stored
from marlaas_api.bus_nats.layout import Config, bucket_config, bucket_stream, merged, nanoseconds, stream_config
from marlaas_api.bus_nats.link import Link
from marlaas_api.bus_nats.pulls import InboxPool
from marlaas_api.bus_nats.routes import Incoming, Route
from marlaas_api.bus_nats.verdicts import Missing
from marlaas_api.subjects import BUCKETS, STREAMS, BucketSpec, StreamSpec


async def connect(
    url: str, *, name: str, creds: Path | None = None, connect_timeout_s: float = 10.0, inbox_prefix: str | None = None
) -> "NatsBus":
    """Connect; wait up to `connect_timeout_s` for a server that does not run yet.

    Args:
        url: `nats://host:port` or `tls://host:port`.
        name: shown by the server's monitoring and in errors.
        creds: a NATS credentials file, read again at every reconnect. When its token expires, the server ends the
            connection, and the client reconnects with the file's current content.
        inbox_prefix: prefix of the reply subjects; None: the prefix that the credentials allow.

    Raises:
        BusUnavailable: no server within the time.
        BusRefused: the server rejects the credentials, or forbids this user to subscribe to its own inboxes.
    """
    link = Link(Dial(url, name, creds, inbox_prefix))
    await link.open(connect_timeout_s)
    return NatsBus(link)


class NatsBus:
    """A connection that implements `Bus`. Calls during an outage wait for the server, at most five seconds."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._jetstream = JetStream(link)
        self._inboxes = InboxPool(link)

    @property
    def max_payload_bytes(self) -> int:
        return self._link.max_payload_bytes

    @property
    def connected(self) -> bool:
        """Whether the client is connected now."""
        return self._link.connected

    @property
    def num_breaks(self) -> int:
        """Number of times that the connection has broken since it was opened."""
        return self._link.num_breaks

    async def publish(
        self, subject: str, data: bytes, *, message_id: str | None = None, expect_last: int | None = None
    ) -> int:
        headers: dict[str, str] = {}
        if message_id is not None:
            headers["Nats-Msg-Id"] = message_id
        if expect_last is not None:
            headers["Nats-Expected-Last-Subject-Sequence"] = str(expect_last)
        return await self._jetstream.publish(checked_subject(subject), data, headers)

    async def last(self, stream: str, subject: str) -> Stored | None:
        message = await self._jetstream.last(stream, subject)
        return None if message is None else stored(message)

    async def replay(self, stream: str, subject: str, start: int = 1) -> list[Stored]:
        return [message async for page in self.pages(stream, subject, start) for message in page]

    async def pages(self, stream: str, subject: str, start: int = 1) -> AsyncIterator[list[Stored]]:
        async for page in self._jetstream.pages(stream, subject, start):
            yield [stored(message) for message in page]

    async def state(self, stream: str) -> StreamState:
        info = await self._jetstream.info(stream)
        found = info["state"]
        return StreamState(int(found["last_seq"]), int(found["bytes"]), int(info["config"]["max_bytes"]))

    async def purge(self, stream: str, subject: str, up_to: int | None = None) -> None:
        if up_to is not None and up_to <= 1:
            return
        request: dict[str, object] = {"filter": subject}
        if up_to is not None:
            request["seq"] = up_to
        await self._jetstream.api(f"STREAM.PURGE.{stream}", f'purge "{subject}" from {stream}', request)

    async def consumer(
        self, stream: str, name: str, subject: str, *, ack_wait_s: float = 30.0, max_pending: int = 1000
    ) -> Consumer:
        config = {
            "name": name,
            "durable_name": name,
            "filter_subject": subject,
            "ack_policy": "explicit",
            "ack_wait": nanoseconds(ack_wait_s),
            "max_ack_pending": max_pending,
        }
        call = f"CONSUMER.CREATE.{stream}.{name}.{subject}"
        action = f'create the consumer {name} of {stream} for "{subject}"'
        await self._jetstream.api(call, action, {"stream_name": stream, "config": config})
        return NatsConsumer(self._jetstream, self._link, self._inboxes, Durable(stream, name, ack_wait_s))

    async def claims(self, stream: str, name: str, *, ack_wait_s: float = 30.0) -> Consumer:
        return NatsConsumer(
            self._jetstream, self._link, self._inboxes, Durable(stream, name, ack_wait_s, inspected=False)
        )

    async def position(self, stream: str, name: str) -> Position | None:
        try:
            info = await self._jetstream.api(
                f"CONSUMER.INFO.{stream}.{name}", f"look at the consumer {name} of {stream}"
            )
        except Missing:
            return None
        return Position(int(info["ack_floor"]["stream_seq"]), int(info["num_pending"]) + int(info["num_ack_pending"]))

    async def delete_consumer(self, stream: str, name: str) -> None:
        try:
            await self._jetstream.api(f"CONSUMER.DELETE.{stream}.{name}", f"delete the consumer {name} of {stream}")
        except Missing:
            return

    async def bucket(self, name: str, *, inspected: bool = True) -> Bucket:
        if inspected:
            await self._jetstream.info(bucket_stream(name))
        return NatsBucket(self._jetstream, self._link, name)

    async def send(self, subject: str, data: bytes, reply: str = "") -> None:
        await self._link.send(checked_subject(subject), data, reply)

    @asynccontextmanager
    async def listen(
        self, subject: str, handler: Callable[[Request], Awaitable[None]], queue: str = ""
    ) -> AsyncIterator[None]:
        arrivals: asyncio.Queue[Incoming | Exception] = asyncio.Queue()
        unsubscribe = await self._link.subscribe(Route(subject, arrivals.put_nowait, arrivals.put_nowait), queue)

        async def hand_over() -> None:
            while True:
                message = await arrivals.get()
                if isinstance(message, Exception):
                    raise message
                await handler(Request(message.subject, message.reply, message.data))

        try:
            async with background(hand_over()):
                yield
        finally:
            await unsubscribe()

    def new_inbox(self) -> str:
        return self._link.new_inbox()

    async def ensure(
        self, streams: tuple[StreamSpec, ...] = STREAMS, buckets: tuple[BucketSpec, ...] = BUCKETS
    ) -> None:
        for config in [*map(stream_config, streams), *map(bucket_config, buckets)]:
            await self._ensure(str(config["name"]), config)

    async def close(self) -> None:
        await self._link.close()

    async def _ensure(self, stream: str, config: Config) -> None:
        try:
            existing = (await self._jetstream.info(stream))["config"]
        except Missing:
            await self._jetstream.api(f"STREAM.CREATE.{stream}", f"create the stream {stream}", config)
            return
        update = merged(existing, config)
        if update is not None:
            await self._jetstream.api(f"STREAM.UPDATE.{stream}", f"update the stream {stream}", update)
