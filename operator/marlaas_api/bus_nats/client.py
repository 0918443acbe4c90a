"""nats-py 2.16 with what it gets wrong put right; this and `link` are the only modules that import `nats`."""

import asyncio
from typing import Any

import nats.errors
from nats.aio.client import Client

from marlaas_api.bus import BusRefused, BusUnavailable
from marlaas_api.bus_nats.verdicts import Lost

_EXPIRED = ("authentication expired", "authentication revoked")
_NEVER = (nats.errors.BadSubjectError, nats.errors.BadHeaderError, nats.errors.MaxPayloadError)


class NatsClient(Client):  # type: ignore[misc]
    """nats-py takes an expired token for the end; it is the moment to connect with the renewed one. It leaves open what the server turned
    away. And an answer that nobody waits for any more (a `flush` that was cancelled, or too slow) ends its reading: the connection is deaf
    until missing pings give it away, half a minute later."""

    async def _process_err(self, err_msg: str) -> None:
        if any(words in err_msg.lower() for words in _EXPIRED):
            await self._process_op_err(nats.errors.StaleConnectionError())
        else:
            await super()._process_err(err_msg)

    async def _process_connect_init(self) -> None:
        try:
            await super()._process_connect_init()
        except BaseException:
            if self._transport is not None:
                self._transport.close()
            raise

    async def _process_pong(self) -> None:
        if self._pongs and self._pongs[0].done():
            self._pongs[0] = asyncio.get_running_loop().create_future()
        await super()._process_pong()


def speaking_nats(option: Any) -> Any:
    """Callbacks that raise what nats-py expects of them: anything else would end its reconnecting without a word."""
    if not callable(option):
        return option

    def call(*arguments: Any) -> Any:
        try:
            return option(*arguments)
        except BusRefused as error:
            raise nats.errors.Error(str(error)) from None

    return call


def translated(error: Exception, action: str) -> BusUnavailable | BusRefused:
    """Our word for an error of nats-py's that was met while doing `action`."""
    kind = BusRefused if isinstance(error, _NEVER) else Lost
    return kind(f"NATS: cannot {action}: {str(error).removeprefix('nats: ')}")
