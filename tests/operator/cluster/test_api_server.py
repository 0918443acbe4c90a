"""What an answer means, of the API server or of whoever stands before it; and where nobody answers."""

import json
import socket
from dataclasses import replace

import pytest
from tests.operator.objects import kubeconfig
from tests.tables import rows

from marlaas_operator.cluster import NoAnswer, Terminating, TooMany
from marlaas_operator.cluster.api_server import connect
from marlaas_operator.cluster.errors import api_error
from marlaas_operator.cluster.resources import KINDS, OWNED, RLJOBS


async def test_nobody_at_home_is_told_from_a_server_in_trouble(tmp_path):
    with socket.socket() as closed:  # bound and not listening: what connects is refused
        closed.bind(("127.0.0.1", 0))
        gateway = await connect(kubeconfig(tmp_path, f"http://127.0.0.1:{closed.getsockname()[1]}"))
        try:
            with pytest.raises(NoAnswer, match="cannot list rljobs: the API server does not answer"):
                await gateway.list(RLJOBS)
        finally:
            await gateway.close()


async def test_kinds_that_a_server_does_not_list_are_told_from_those_that_it_does(control_plane):
    missing = [replace(RLJOBS, plural="unheard"), replace(RLJOBS, api_version="example.com/v1")]
    gateway = await connect(control_plane.kubeconfig)
    try:
        assert await gateway.unserved([*KINDS, *missing, *OWNED]) == missing
    finally:
        await gateway.close()


async def test_a_proxy_of_the_environment_is_used_unless_the_server_is_excepted(tmp_path, monkeypatch):
    monkeypatch.setenv("http_proxy", "http://proxy.example:3128")
    monkeypatch.setenv("no_proxy", "10.96.0.1")
    proxies = []
    for server in ("http://api.example:6443", "http://10.96.0.1:443"):
        gateway = await connect(kubeconfig(tmp_path, server))
        proxies.append(gateway.configuration.proxy)
        await gateway.close()
    assert proxies == ["http://proxy.example:3128", None]


@pytest.mark.parametrize(("status", "kind"), rows(__file__, "answers"))
def test_the_status_of_an_answer_says_whether_it_may_pass(status, kind):
    error = api_error(status, b"{}", "cannot get it")
    assert type(error).__name__ == kind
    assert str(error).startswith("cannot get it: ")


def test_patience_is_bounded_and_an_end_of_a_namespace_is_no_refusal():
    patient = api_error(429, b"", "cannot", "7200")
    assert isinstance(patient, TooMany)
    assert patient.retry_after_s == 60.0
    ending = {"message": "being terminated", "details": {"causes": [{"reason": "NamespaceTerminating"}]}}
    assert isinstance(api_error(403, json.dumps(ending).encode(), "cannot"), Terminating)
