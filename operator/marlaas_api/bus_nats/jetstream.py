"""JetStream by its own API over a `Link`: publish, direct reads, administration (nats-server docs, ADR-8, ADR-31).

Reads are direct: any replica may answer, so on a replicated stream they can be a moment old. Compare-and-set is exact.
"""

import asyncio
import json
from collections.abc import Mapping
from typing import Any

from marlaas_api.bus import BusRefused, BusUnavailable, Conflict, Stored
from marlaas_api.bus_nats.link import ANSWER_S, Link, Lost
from marlaas_api.bus_nats.routes import Incoming, Route, status
from marlaas_api.bus_nats.verdicts import Missing, verdict

API = "$JS.API"
_BATCH = 1000
# Twice the largest message, and well below what a server lets wait for a client before it hangs up (64 MB).
_BATCH_BYTES = 16 << 20
_NO_RESPONDERS = "503"


def sequence(message: Incoming) -> int:
    """Stream sequence of a message that was read directly."""
    return int((message.headers or {})["Nats-Sequence"])


def stored(message: Incoming) -> Stored:
    """A message that was read directly."""
    return Stored((message.headers or {})["Nats-Subject"], sequence(message), message.data)


class JetStream:
    """One account's JetStream."""

    def __init__(self, link: Link) -> None:
        self._link = link

    async def api(self, call: str, action: str, request: Mapping[str, object] | None = None) -> dict[str, Any]:
        """An administrative call; it may be sent twice. `action` says in an error what was being done."""
        answer = await self._link.ask(f"{API}.{call}", json.dumps(request).encode() if request else b"")
        if status(answer) == _NO_RESPONDERS:
            raise BusUnavailable(f"NATS: cannot {action}: JetStream is not enabled on the server, or not ready")
        reply: dict[str, Any] = json.loads(answer.data)
        if "error" in reply:
            raise verdict(reply["error"], action)
        return reply

    async def info(self, stream: str) -> dict[str, Any]:
        """Config and state of a stream. Raises Missing."""
        return await self.api(f"STREAM.INFO.{stream}", f"read the stream {stream} (was it created by `ensure`?)")

    async def publish(self, subject: str, data: bytes, headers: dict[str, str]) -> int:
        """Store and return the sequence.

        With a `Nats-Msg-Id` it survives a broken connection: it is sent again within the deadline, and stored once.
        """
        message_id = headers.get("Nats-Msg-Id")
        deadline = asyncio.get_running_loop().time() + ANSWER_S
        while True:
            try:
                answer = await self._link.request(subject, data, deadline, headers or None)
            except Lost:
                if message_id is None:
                    raise
                continue
            if status(answer) == _NO_RESPONDERS:
                raise await self._unanswered(subject)
            reply: dict[str, Any] = json.loads(answer.data)
            if "error" not in reply:
                return int(reply["seq"])
            return await self._resolve(reply, subject, message_id)

    async def _resolve(self, reply: dict[str, Any], subject: str, message_id: str | None) -> int:
        """A refused publish. The server checks the expected sequence before it looks for duplicates, so a conflict may
        be with our own earlier attempt.
        """
        error = verdict(reply["error"], f'publish to "{subject}"')
        if isinstance(error, Conflict) and message_id is not None:
            last = await self.last(reply["stream"], subject)
            if last is not None and (last.headers or {}).get("Nats-Msg-Id") == message_id:
                return sequence(last)
        raise error

    async def last(self, stream: str, subject: str) -> Incoming | None:
        """The newest message of exactly this subject."""
        answer = await self._link.ask(f"{API}.DIRECT.GET.{stream}.{subject}")
        match status(answer):
            case "":
                return answer
            case "404":
                return None
            case _:
                await self.info(stream)
                raise BusUnavailable(f'NATS: the stream {stream} does not answer for "{subject}"')

    async def read(self, stream: str, subject: str, start: int = 1) -> list[Incoming]:
        """All messages of a subject (wildcards allowed) from a sequence on, up to the stream's last one as of now."""
        end = int((await self.info(stream))["state"]["last_seq"])
        found: list[Incoming] = []
        more = True
        while more and start <= end:
            try:
                batch, more = await self._batch(stream, subject, start)
            except Lost:
                continue
            found += [message for message in batch if sequence(message) <= end]
            start = sequence(batch[-1]) + 1 if batch else end + 1
        return found

    async def _batch(self, stream: str, subject: str, start: int) -> tuple[list[Incoming], bool]:
        """The next messages, and whether there are more."""
        request = {"seq": start, "next_by_subj": subject, "batch": _BATCH, "max_bytes": _BATCH_BYTES}
        call = f"{API}.DIRECT.GET.{stream}"
        batch = _Batch(call)
        reply = self._link.open_route(batch.route)
        try:
            await self._link.send(call, json.dumps(request).encode(), reply)
            async with asyncio.timeout(2 * ANSWER_S):
                return batch.messages, await batch.more
        except TimeoutError:
            raise BusUnavailable(f'NATS: the stream {stream} stopped in the midst of "{subject}"') from None
        finally:
            self._link.close_route(reply)

    async def _unanswered(self, subject: str) -> BusRefused | BusUnavailable:
        """Why nobody acknowledged a publish: no stream has the subject, or the one that has it is without a leader."""
        action = f'publish to "{subject}"'
        names = (await self.api("STREAM.NAMES", action, {"subject": subject})).get("streams")
        if not names:
            return Missing(f'NATS: no stream stores "{subject}"; were the streams created by `ensure` on this server?')
        return BusUnavailable(f"NATS: cannot {action}: the stream {names[0]} does not answer")


class _Batch:
    """Collects a direct read until the server's end mark."""

    def __init__(self, call: str) -> None:
        self.messages: list[Incoming] = []
        self.more: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self.route = Route(call, self._receive, self._fail)

    def _receive(self, message: Incoming) -> None:
        match status(message):
            case "":
                self.messages.append(message)
            case "204" | "404":
                self._end(int((message.headers or {}).get("Nats-Num-Pending", "0")) > 0)
            case other:
                why = (message.headers or {}).get("Description", "")
                self._fail(BusUnavailable(f"NATS: a direct read ended with {other} {why.strip()}"))

    def _end(self, more: bool) -> None:
        if not self.more.done():
            self.more.set_result(more)

    def _fail(self, error: Exception) -> None:
        if not self.more.done():
            self.more.set_exception(error)
