"""The daemon beside the kubelet that does what a network plugin and a volume provisioner do: policies and folders.

Level-based: watches everything, compares after each change and once a second, and acts on differences only. An error is logged once and
tried again.
"""

import contextlib
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from marlaas_e2e.api import ApiClient, ApiError
from marlaas_e2e.collection_cache import CollectionCache
from marlaas_e2e.node.layout import Layout
from marlaas_e2e.node.policies import KINDS, Network
from marlaas_e2e.node.servers import api_client
from marlaas_e2e.node.volumes import folder_of, missing_volumes, released_volumes

_PERIOD_S = 1.0
"""Longest time in seconds between two comparisons; after it, a change that failed is made again."""
_PAUSE_S = 0.1
"""Seconds between two comparisons, so that many changes at once cost one."""
_VOLUMES, _CLAIMS = "/api/v1/persistentvolumes", "/api/v1/persistentvolumeclaims"
_DONE = (404, 409)
"""HTTP statuses: the object to delete does not exist (404); the object to create exists (409)."""


class PolicyRefused(Exception):
    """nft did not take the script."""


class PolicyEnforcer:
    """Keeps the namespace's nftables rules equal to the policies."""

    def __init__(self, cache: CollectionCache) -> None:
        self._cache = cache
        self._applied = ""

    def step(self) -> None:
        script = Network(*map(self._cache.objects, KINDS)).nft_script()
        if script != self._applied:
            done = subprocess.run(["nft", "-f", "-"], input=script, capture_output=True, text=True)
            if done.returncode != 0:
                raise PolicyRefused(f"{done.stderr}\n{script}")
            self._applied = script


class Provisioner:
    """Makes a folder and a volume for every pending claim, and removes both when the claim is gone."""

    def __init__(self, client: ApiClient, cache: CollectionCache, folder: Path) -> None:
        self._client = client
        self._cache = cache
        self._folder = folder

    def step(self) -> None:
        claims, volumes = self._cache.objects(_CLAIMS), self._cache.objects(_VOLUMES)
        for volume in missing_volumes(claims, volumes, self._folder):
            folder_of(volume).mkdir(parents=True, exist_ok=True)
            with _done_already():
                self._client.create(_VOLUMES, volume)
        for volume in released_volumes(volumes):
            shutil.rmtree(folder_of(volume), ignore_errors=True)
            with _done_already():
                self._client.delete(f"{_VOLUMES}/{volume['metadata']['name']}")


@contextlib.contextmanager
def _done_already() -> Iterator[None]:
    """Ignore the answers to a change that was made before, and that the watch has not shown yet."""
    try:
        yield
    except ApiError as error:
        if error.status not in _DONE:
            raise


def main() -> None:
    """Run until killed."""
    layout = Layout(Path(sys.argv[1]))
    client = api_client(layout)
    cache = CollectionCache(partial(api_client, layout), (*KINDS, _CLAIMS, _VOLUMES))
    enforcer, provisioner = PolicyEnforcer(cache), Provisioner(client, cache, layout.volumes)
    said = ""
    while True:
        now = "".join(filter(None, (_tried(enforcer.step), _tried(provisioner.step))))
        if now and now != said:
            print(now, file=sys.stderr, flush=True)
        said = now
        time.sleep(_PAUSE_S)
        cache.wait(_PERIOD_S)


def _tried(step: Callable[[], None]) -> str | None:
    try:
        step()
    except (ApiError, PolicyRefused, NotImplementedError) as error:
        return f"{type(error).__name__}: {error}\n"
    return None


if __name__ == "__main__":
    main()
