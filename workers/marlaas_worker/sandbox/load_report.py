"""Waits for the report of a fork server that its environment is loaded, or is broken."""

import asyncio
import json
import socket
from collections.abc import Callable
from typing import Any

from marlaas_worker.sandbox.output import Output
from marlaas_worker.sandbox.server import INVALID_REPORT, PACKET_BYTES, BrokenEnvironment

MAX_EXTENSION = 10
"""A process that gets little of the CPU may take so many times the limit."""
_MIN_SHARE = 0.01
"""CPU seconds per second of a process that still loads. One that hangs uses less."""
_FULL_SHARE = 0.5
"""CPU seconds per second above which a process was not short of CPU: then the limit holds as it is."""


async def wait_until_loaded(
    control: socket.socket, output: Output, timeout_s: float, cpu_s: Callable[[], float] | None = None
) -> None:
    """Wait for the report that the environment is loaded.

    Args:
        timeout_s: limit. With a low share of a busy CPU, imports take many times as long as alone; then it is extended as
            long as the process computes, up to MAX_EXTENSION times.
        cpu_s: returns the CPU seconds that the process has used; None if they are unknown: the limit is not extended.

    Raises:
        BrokenEnvironment: it cannot be loaded, or not in time.
    """
    packet = await _report(control, output, timeout_s, cpu_s)
    report: dict[str, Any] = {"report": "broken", "text": "the process exited while it loaded the environment"}
    try:
        if packet:
            report = json.loads(packet)
        broken = report["report"] == "broken"
        text, is_permanent = (str(report["text"]), report.get("is_permanent") is True) if broken else ("", False)
    except INVALID_REPORT as error:
        raise BrokenEnvironment(
            f"the process that loads the environment sent an invalid report: {type(error).__name__}"
        ) from error
    if broken:
        raise BrokenEnvironment(f"{text}\n{output.text()}".rstrip(), is_permanent=is_permanent)


async def _report(control: socket.socket, output: Output, timeout_s: float, cpu_s: Callable[[], float] | None) -> bytes:
    """Return the report; empty if the process has closed its connection."""
    used_s = 0.0
    for extension in range(1, MAX_EXTENSION + 1):
        try:
            async with asyncio.timeout(timeout_s):
                return await asyncio.get_running_loop().sock_recv(control, PACKET_BYTES)
        except TimeoutError:
            before_s, used_s = used_s, cpu_s() if cpu_s is not None else 0.0
            share = (used_s - before_s) / timeout_s
            if not _MIN_SHARE <= share < _FULL_SHARE or extension == MAX_EXTENSION:
                text = f"loading the environment took longer than {extension * timeout_s:g} s\n{output.text()}"
                raise BrokenEnvironment(text.rstrip()) from None
        except OSError:
            return b""
    raise AssertionError("the last extension returns or raises")
