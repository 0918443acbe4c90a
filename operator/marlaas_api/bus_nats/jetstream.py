"""JetStream's API over a `Link`: publish, direct reads, administration (nats-server docs, ADR-8, ADR-31).

Any replica may answer a direct read, so that reads of a replicated stream can be slightly out of date. Compare-and-set
is exact.
"""

import asyncio
import json
from base64 import b64decode
from collections.abc import AsyncIterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from marlaas_api.bus import BusRefused, BusUnavailable, RevisionConflict, Stored
from marlaas_api.bus_nats.link import Link
from marlaas_api.bus_nats.routes import Incoming, Route, status
from marlaas_api.bus_nats.verdicts import Lost, Missing, NoMessage, SubjectForbidden, verdict

API = "$JS.API"
_BATCH = 1000
# Twice the largest message, and well below the 64 MB of pending data at which a server disconnects a client.
_BATCH_BYTES = 16 << 20
_NO_RESPONDERS = "503"
_PROBE_S = 1.0


def sequence(message: Incoming) -> int:
    """Return the stream sequence of a message from a direct read."""
    return int((message.headers or {})["Nats-Sequence"])


def stored(message: Incoming) -> Stored:
    """Convert a message from a direct read."""
    return Stored((message.headers or {})["Nats-Subject"], sequence(message), message.data)


@dataclass(frozen=True, slots=True, eq=False)
class LeaderMessage:
    """A stored message as the stream's leader returns it."""

    subject: str
    sequence: int
    data: bytes
    headers: Mapping[str, str] | None
    reply: str = ""

    @classmethod
    def of(cls, message: Mapping[str, Any]) -> "LeaderMessage":
        """Parse the `message` of a STREAM.MSG.GET reply; data and headers are base64."""
        lines = b64decode(message.get("hdrs", "")).decode().split("\r\n")[1:]
        headers = {
            name.strip(): value.strip() for name, found, value in (line.partition(":") for line in lines) if found
        }
        return cls(message["subject"], int(message["seq"]), b64decode(message.get("data", "")), headers)


class JetStream:
    """The JetStream API of one account."""

    def __init__(self, link: Link) -> None:
        self._link = link

    async def api(self, call: str, action: str, request: Mapping[str, object] | None = None) -> dict[str, Any]:
        """Make an administrative call and return its reply; the call may be sent twice. action: describes the call in errors."""
        answer = await self._link.ask(f"{API}.{call}", json.dumps(request).encode() if request else b"")
        if status(answer) == _NO_RESPONDERS:
            raise BusUnavailable(f"NATS: cannot {action}: JetStream is not enabled on the server, or not ready")
        reply: dict[str, Any] = json.loads(answer.data)
        if "error" in reply:
            raise verdict(reply["error"], action)
        return reply

    async def info(self, stream: str) -> dict[str, Any]:
        """Return config and state of a stream. Raises Missing."""
        return await self.api(f"STREAM.INFO.{stream}", f"read the stream {stream} (was it created by `ensure`?)")

    async def publish(self, subject: str, data: bytes, headers: dict[str, str]) -> int:
        """Store a message and return its sequence.

        With a `Nats-Msg-Id`, the message is sent again after a broken connection, within the deadline, and stored once.
        """
        message_id = headers.get("Nats-Msg-Id")
        deadline = self._link.deadline()
        while True:
            try:
                answer = await self._link.request(subject, data, deadline, headers or None)
            except Lost:
                if message_id is None:
                    raise
                continue
            except BusUnavailable as error:
                raise await self._stuck(subject, error) from None
            if status(answer) == _NO_RESPONDERS:
                raise await self._unanswered(subject)
            reply: dict[str, Any] = json.loads(answer.data)
            if "error" not in reply:
                return int(reply["seq"])
            return await self._resolve(reply, subject, message_id)

    async def _resolve(self, reply: dict[str, Any], subject: str, message_id: str | None) -> int:
        """Raise the error of a refused publish, or return the sequence of our own earlier attempt.

        For a stream without replicas, the server checks the expected sequence before it looks for duplicates; for a
        replicated one, it knows the ids of the last two minutes only. A conflict may therefore be with an earlier attempt
        that has the same message id.
        """
        error = verdict(reply["error"], f'publish to "{subject}"')
        if isinstance(error, RevisionConflict) and message_id is not None:
            last = await self.last(reply["stream"], subject)
            if last is not None and (last.headers or {}).get("Nats-Msg-Id") == message_id:
                return sequence(last)
        raise error

    async def last(self, stream: str, subject: str) -> Incoming | None:
        """Return the newest message of exactly this subject; None if there is none."""
        answer = await self._link.ask(f"{API}.DIRECT.GET.{stream}.{subject}")
        match status(answer):
            case "":
                return answer
            case "404":
                return None
            case _:
                with suppress(SubjectForbidden):
                    await self.info(stream)
                raise BusUnavailable(f'NATS: the stream {stream} does not answer for "{subject}"')

    async def last_at_leader(self, stream: str, subject: str) -> LeaderMessage | None:
        """Return the newest message of exactly this subject at the stream's leader; None if there is none."""
        try:
            reply = await self.api(f"STREAM.MSG.GET.{stream}", f'read "{subject}"', {"last_by_subj": subject})
        except NoMessage:
            return None
        return LeaderMessage.of(reply["message"])

    async def pages(self, stream: str, subject: str, start: int = 1) -> AsyncIterator[list[Incoming]]:
        """Iterate over the messages of a log's subject (wildcards allowed) from a sequence on, up to the stream's last one now."""
        end = int((await self.info(stream))["state"]["last_seq"])
        more = True
        while more and start <= end:
            page, more = await self.page(stream, subject, start)
            yield [message for message in page if sequence(message) <= end]
            start = sequence(page[-1]) + 1 if page else end + 1

    async def page(self, stream: str, subject: str, start: int) -> tuple[list[Incoming], bool]:
        """Return the next messages of a subject (wildcards allowed) from a sequence on, and whether there are more."""
        while True:
            with suppress(Lost):
                return await self._batch(stream, subject, start)

    async def _batch(self, stream: str, subject: str, start: int) -> tuple[list[Incoming], bool]:
        """Return the next messages, and whether there are more."""
        request = {"seq": start, "next_by_subj": subject, "batch": _BATCH, "max_bytes": _BATCH_BYTES}
        call = f"{API}.DIRECT.GET.{stream}"
        batch = _Batch(call)
        reply = self._link.open_route(batch.route)
        try:
            await self._link.send(call, json.dumps(request).encode(), reply)
            async with asyncio.timeout_at(self._link.deadline()):
                more = await batch.more
        except TimeoutError:
            raise BusUnavailable(f'NATS: the stream {stream} stopped answering while reading "{subject}"') from None
        finally:
            self._link.close_route(reply)
        if isinstance(more, Exception):
            raise more
        return batch.messages, more

    async def _stuck(self, subject: str, error: BusUnavailable) -> BusUnavailable:
        """Return the error for a publish without an answer; ask the server whether it is up otherwise.

        A server that cannot write to its disk does not answer a publish at all.
        """
        if not self._link.connected:
            return error
        try:
            async with asyncio.timeout(_PROBE_S):
                await self._unanswered(subject)
        except (BusUnavailable, BusRefused, TimeoutError):
            return error
        return BusUnavailable(
            f'NATS does not store "{subject}" although the server is up: its disk may be full. Its log says why; make '
            "room, then restart it"
        )

    async def _unanswered(self, subject: str) -> BusRefused | BusUnavailable:
        """Return the error for a publish without responders: no stream has the subject, or its stream has no leader."""
        action = f'publish to "{subject}"'
        try:
            names = (await self.api("STREAM.NAMES", action, {"subject": subject})).get("streams")
        except SubjectForbidden:
            return BusUnavailable(f"NATS: cannot {action}: no stream takes it now")
        if not names:
            return Missing(f'NATS: no stream stores "{subject}"; were the streams created by `ensure` on this server?')
        return BusUnavailable(f"NATS: cannot {action}: the stream {names[0]} does not answer")


class _Batch:
    """Collector of a direct read, up to the server's end mark.

    more: resolves to whether further messages exist, or to the reason for a missing end mark.
    """

    def __init__(self, call: str) -> None:
        self.messages: list[Incoming] = []
        self.more: asyncio.Future[bool | Exception] = asyncio.get_running_loop().create_future()
        self.route = Route(call, self._receive, self._end)

    def _receive(self, message: Incoming) -> None:
        headers = message.headers or {}
        match status(message):
            case "":
                self.messages.append(message)
            case "204" | "404":
                self._end(int(headers.get("Nats-Num-Pending", "0")) > 0)
            case other:
                self._end(
                    BusUnavailable(f"NATS: a direct read ended with {other} {headers.get('Description', '').strip()}")
                )

    def _end(self, outcome: bool | Exception) -> None:
        if not self.more.done():
            self.more.set_result(outcome)
