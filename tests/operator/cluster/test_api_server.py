"""The gateway where there is no API server to answer."""

import socket
from pathlib import Path

import pytest
import yaml

from marlaas_operator.cluster import NoAnswer
from marlaas_operator.cluster.api_server import connect
from marlaas_operator.cluster.resources import RLJOBS


async def test_nobody_at_home_is_told_from_a_server_in_trouble(tmp_path: Path) -> None:
    with socket.socket() as closed:  # bound and not listening: what connects is refused
        closed.bind(("127.0.0.1", 0))
        server = f"http://127.0.0.1:{closed.getsockname()[1]}"
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "here",
            "contexts": [{"name": "here", "context": {"cluster": "here", "user": "me"}}],
            "clusters": [{"name": "here", "cluster": {"server": server}}],
            "users": [{"name": "me", "user": {"token": "x"}}],
        }
        kubeconfig = tmp_path / "config"
        kubeconfig.write_text(yaml.safe_dump(config))
        gateway = await connect(kubeconfig)
        try:
            with pytest.raises(NoAnswer, match="cannot list rljobs: the API server does not answer"):
                await gateway.list(RLJOBS)
        finally:
            await gateway.close()
