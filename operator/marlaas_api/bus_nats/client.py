"""nats-py 2.16 with corrections; the only module that imports `nats`."""

import asyncio
import importlib
import sys
from typing import Any

from marlaas_api.bus import BusRefused, BusUnavailable
from marlaas_api.bus_nats.verdicts import Lost

# nats-py imports aiohttp if it can, and needs it for WebSocket URLs alone. Importing it takes a quarter of the start of a
# small role, in CPU and in memory, so it is hidden here, and imported by `prepare_transport` if a URL needs it.
_HIDDEN = [name for name in ("aiohttp", "multidict") if name not in sys.modules]
sys.modules.update(dict.fromkeys(_HIDDEN))  # type: ignore[arg-type]  # None makes an import raise ImportError
try:
    from nats import errors as errors
    from nats.aio import transport
    from nats.aio.client import Client
finally:
    for _name in _HIDDEN:
        del sys.modules[_name]

_EXPIRED = ("authentication expired", "authentication revoked")
_NEVER = (errors.BadSubjectError, errors.BadHeaderError, errors.MaxPayloadError)


def prepare_transport(url: str) -> None:
    """Import the libraries that a connection to this URL needs. Raises BusRefused if they are not installed."""
    if not url.startswith(("ws://", "wss://")):
        return
    try:
        transport.aiohttp, transport.multidict = map(importlib.import_module, ("aiohttp", "multidict"))
    except ImportError as error:
        raise BusRefused(f"a WebSocket connection to NATS needs {error.name}, which is not installed") from error


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
            await self._process_op_err(errors.StaleConnectionError())
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
            raise errors.Error(str(error)) from None

    return call


def translated(error: Exception, action: str) -> BusUnavailable | BusRefused:
    """Return our exception for an error of nats-py that occurred during `action`."""
    kind = BusRefused if isinstance(error, _NEVER) else Lost
    return kind(f"NATS: cannot {action}: {str(error).removeprefix('nats: ')}")
