"""Libraries that a role imports only if it needs them: each one costs CPU and memory in every sandbox."""

import subprocess
import sys

import pytest

from marlaas_api.bus import BusRefused
from marlaas_api.bus_nats.client import prepare_transport, transport

HEAVY = {"aiohttp", "numpy", "torch", "transformers", "vllm"}
FORK_SERVER = {"asyncio", "logging", "nats", "pydantic", "ssl"}


def _imported(module: str) -> set[str]:
    program = f"import {module}, sys; print(*sys.modules)"
    return set(
        subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True).stdout.split()
    )


def test_a_sandbox_imports_neither_numpy_nor_an_http_client_nor_a_model_library() -> None:
    found = _imported("marlaas_worker.__main__, marlaas_worker.sandbox.service")
    assert "nats" in found
    assert found & HEAVY == set()


def test_a_fork_server_imports_none_of_the_supervisors_libraries() -> None:
    assert _imported("marlaas_worker.sandbox.forkserver") & (HEAVY | FORK_SERVER) == set()
    assert _imported("marlaas_worker.sandbox.template") & (HEAVY | FORK_SERVER) == set()


def test_a_websocket_url_gets_its_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport, "aiohttp", None)
    prepare_transport("nats://127.0.0.1:4222")
    assert transport.aiohttp is None
    prepare_transport("wss://nats.example:443")
    assert transport.aiohttp is sys.modules["aiohttp"]


def test_a_websocket_url_without_its_library_is_refused_with_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "aiohttp", None)
    with pytest.raises(BusRefused, match="needs aiohttp"):
        prepare_transport("ws://nats.example:80")
