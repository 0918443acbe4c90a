"""Waits for the report of a fork server that its environment is loaded, or is broken."""

import asyncio
import json
import re
import socket
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from marlaas.envs.leftovers import MAX_CHARACTERS, MAX_TOLD
from marlaas_api.last_words import visible
from marlaas_api.messages import FaultClass
from marlaas_worker.sandbox.output import Output
from marlaas_worker.sandbox.server import INVALID_REPORT, PACKET_BYTES, BrokenEnvironment

_FAULTS = {fault.value: fault for fault in (FaultClass.INFRA, FaultClass.WAITED)}
_DIGEST = re.compile("[0-9a-f]{64}")
MAX_EXTENSION = 10
"""Longest load time, as a multiple of the limit."""
_SHORT_OF_CPU = 0.5
"""Least fraction of the time that a process must wait for a CPU to count as short of CPU."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """Report of a fork server that has loaded its environments.

    Attributes:
        told: warnings about the load, one sentence each.
        data_digest: one SHA-256 for all data sets that were loaded; empty: none.
    """

    told: tuple[str, ...] = ()
    data_digest: str = ""


async def wait_until_loaded(
    control: socket.socket,
    output: Output,
    timeout_s: float,
    cpu_wait_s: Callable[[], float] | None = None,
    suites: Collection[str] = (),
) -> Loaded:
    """Wait for the report that the environment is loaded.

    Args:
        control: connection to the fork server.
        output: of the fork server, for the text of the error.
        timeout_s: limit. It is extended, to at most `MAX_EXTENSION` times itself, while the process is short of CPU: with a low share
            of a busy CPU, imports take many times as long.
        cpu_wait_s: returns the seconds that the process has waited for a CPU so far; None: unknown, the limit is not extended.
        suites: names of the suites whose own environments the fork server must have loaded, besides the job's.

    Raises:
        BrokenEnvironment: the environment cannot be loaded, or not in time, or the report is invalid or lacks one of `suites`.
    """
    packet = await _report(control, output, timeout_s, cpu_wait_s or (lambda: 0.0))
    report: dict[str, Any] = {"report": "broken", "text": "the process exited while it loaded the environment"}
    try:
        if packet:
            report = json.loads(packet)
        broken = report["report"] == "broken"
        text, is_permanent = (str(report["text"]), report.get("is_permanent") is True) if broken else ("", False)
        loaded = {str(one) for one in report.get("suites", ())}
        data = str(report.get("data", ""))
        told = tuple(visible(str(one))[:MAX_CHARACTERS] for one in list(report.get("told", ()))[:MAX_TOLD])
    except INVALID_REPORT as error:
        raise BrokenEnvironment(
            f"the process that loads the environment sent an invalid report: {type(error).__name__}"
        ) from error
    if broken:
        fault = _FAULTS.get(str(report.get("fault")), FaultClass.ENV)
        raise BrokenEnvironment(f"{text}\n{output.text()}".rstrip(), is_permanent=is_permanent, fault=fault)
    if missing := set(suites) - loaded:
        raise BrokenEnvironment(
            f"the release of marlaas in the environment's image does not play suites with an environment of their own ({min(missing)}): build "
            "the image from the worker image of this release",
            is_permanent=True,
        )
    return Loaded(told, data if _DIGEST.fullmatch(data) else "")


async def _report(control: socket.socket, output: Output, timeout_s: float, cpu_wait_s: Callable[[], float]) -> bytes:
    """Return the report, unparsed; empty if the process has closed its connection. Raises BrokenEnvironment after the time limit."""
    waited_s = 0.0
    for extension in range(1, MAX_EXTENSION + 1):
        try:
            async with asyncio.timeout(timeout_s):
                return await asyncio.get_running_loop().sock_recv(control, PACKET_BYTES)
        except TimeoutError:
            before_s, waited_s = waited_s, cpu_wait_s()
            if waited_s - before_s < _SHORT_OF_CPU * timeout_s or extension == MAX_EXTENSION:
                text = f"loading the environment took longer than {extension * timeout_s:g} s\n{output.text()}"
                raise BrokenEnvironment(text.rstrip()) from None
        except OSError:
            return b""
    raise AssertionError("the last extension returns or raises")
