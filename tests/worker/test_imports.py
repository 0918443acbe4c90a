"""Libraries that a role imports only if it needs them: each one costs CPU and memory in every sandbox."""

import subprocess
import sys

import pytest

from marlaas_api.bus import BusRefused
from marlaas_api.bus_nats.client import prepare_transport, transport

HEAVY = {"aiohttp", "numpy", "torch", "transformers", "vllm"}
FORK_SERVER = {"asyncio", "logging", "nats", "pydantic", "ssl"}


def imported(module):
    program = f"import {module}, sys; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    return set(done.stdout.split())


def test_a_sandbox_and_its_fork_server_import_none_of_the_libraries_that_they_do_not_need():
    found = imported("marlaas_worker.__main__, marlaas_worker.sandbox.service")
    assert "nats" in found
    assert found & HEAVY == set()
    for module in ("forkserver", "template"):
        assert imported(f"marlaas_worker.sandbox.{module}") & (HEAVY | FORK_SERVER) == set()


def test_a_websocket_url_gets_its_library_or_is_refused_with_its_name(monkeypatch):
    monkeypatch.setattr(transport, "aiohttp", None)
    prepare_transport("nats://127.0.0.1:4222")
    assert transport.aiohttp is None
    prepare_transport("wss://nats.example:443")
    assert transport.aiohttp is sys.modules["aiohttp"]
    monkeypatch.setitem(sys.modules, "aiohttp", None)
    with pytest.raises(BusRefused, match="needs aiohttp"):
        prepare_transport("ws://nats.example:80")
