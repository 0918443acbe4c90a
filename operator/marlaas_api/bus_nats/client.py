"""nats-py 2.16 with corrections; this module and `link` are the only ones that import `nats`."""

import asyncio
from typing import Any

import nats.errors
from nats.aio.client import Client

from marlaas_api.bus import BusRefused, BusUnavailable
from marlaas_api.bus_nats.verdicts import Lost

_EXPIRED = ("authentication expired", "authentication revoked")
_NEVER = (nats.errors.BadSubjectError, nats.errors.BadHeaderError, nats.errors.MaxPayloadError)


class NatsClient(Client):  # type: ignore[misc]
    """nats-py's client with three corrections.

    - An expired token: nats-py closes for good; this client reconnects with the renewed token (nats-io/nats.py#193,
      nats-io/nats.py#1019).
    - A rejected connection: nats-py leaves its socket open; this client closes it.
    - An answer to a ping whose waiter is gone (a `flush` that was cancelled, or too slow): nats-py stops reading, because
      any unexpected exception ends its read loop (nats-io/nats.py#914), and receives nothing until missing pings are
      noticed half a minute later; this client discards the answer.
    """

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
    """Wrap a callback so that it raises nats-py's exceptions; any other exception silently ends nats-py's reconnecting."""
    if not callable(option):
        return option

    def call(*arguments: Any) -> Any:
        try:
            return option(*arguments)
        except BusRefused as error:
            raise nats.errors.Error(str(error)) from None

    return call


def translated(error: Exception, action: str) -> BusUnavailable | BusRefused:
    """Return our exception for an error of nats-py that occurred during `action`."""
    kind = BusRefused if isinstance(error, _NEVER) else Lost
    return kind(f"NATS: cannot {action}: {str(error).removeprefix('nats: ')}")
