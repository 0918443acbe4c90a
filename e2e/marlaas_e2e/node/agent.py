"""The daemon beside the kubelet that does what a network plugin and a volume provisioner do: policies and folders.

Level-based: reads everything three times a second, and acts on differences only. An error is logged once and tried again.
"""

import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from marlaas_e2e.api import ApiClient, ApiError
from marlaas_e2e.node.layout import Layout
from marlaas_e2e.node.policies import Network
from marlaas_e2e.node.servers import api_client
from marlaas_e2e.node.volumes import folder_of, missing_volumes, released_volumes

_PERIOD_S = 0.3
_VOLUMES = "/api/v1/persistentvolumes"


class PolicyRefused(Exception):
    """nft did not take the script."""


class PolicyEnforcer:
    """Keeps the namespace's nftables rules equal to the policies."""

    def __init__(self, client: ApiClient) -> None:
        self._client = client
        self._applied = ""

    def step(self) -> None:
        script = Network.observed(self._client).nft_script()
        if script != self._applied:
            done = subprocess.run(["nft", "-f", "-"], input=script, capture_output=True, text=True)
            if done.returncode != 0:
                raise PolicyRefused(f"{done.stderr}\n{script}")
            self._applied = script


class Provisioner:
    """Makes a folder and a volume for every pending claim, and removes both when the claim is gone."""

    def __init__(self, client: ApiClient, folder: Path) -> None:
        self._client = client
        self._folder = folder

    def step(self) -> None:
        claims = self._client.list("/api/v1/persistentvolumeclaims?resourceVersion=0")
        volumes = self._client.list(f"{_VOLUMES}?resourceVersion=0")
        for volume in missing_volumes(claims, volumes, self._folder):
            folder_of(volume).mkdir(parents=True, exist_ok=True)
            self._client.create(_VOLUMES, volume)
        for volume in released_volumes(volumes):
            shutil.rmtree(folder_of(volume), ignore_errors=True)
            self._client.delete(f"{_VOLUMES}/{volume['metadata']['name']}")


def main() -> None:
    """Run until killed."""
    layout = Layout(Path(sys.argv[1]))
    client = api_client(layout)
    enforcer, provisioner = PolicyEnforcer(client), Provisioner(client, layout.volumes)
    said = ""
    while True:
        now = "".join(filter(None, (_tried(enforcer.step), _tried(provisioner.step))))
        if now and now != said:
            print(now, file=sys.stderr, flush=True)
        said = now
        time.sleep(_PERIOD_S)


def _tried(step: Callable[[], None]) -> str | None:
    try:
        step()
    except (ApiError, PolicyRefused, NotImplementedError) as error:
        return f"{type(error).__name__}: {error}\n"
    return None


if __name__ == "__main__":
    main()
