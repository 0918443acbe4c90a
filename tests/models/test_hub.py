"""Models of a hub: fetched over HTTP from one that runs here, and what is said when it does not give them.

The hub's client reads its settings when it is imported, so every case is a process of its own.
"""

import errno
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.models.hub_server import COMMIT, Hub, serving

from marlaas.models import CacheFull, inspect, prepare
from marlaas.models import hub as models_hub
from marlaas.models.hub import fetch

pytestmark = pytest.mark.processes
NAME = "some/tiny"
FETCH = """
import json, sys
from marlaas.models.errors import ModelError
from marlaas.models.hub import cached, fetch
pauses = []
try: folder, error = str(fetch(*sys.argv[1:], pause=pauses.append)), None
except ModelError as caught: folder, error = None, [type(caught).__name__, str(caught)]
found = cached(*sys.argv[1:])
print(json.dumps([folder, error, pauses, found and str(found)]))
"""

MANIFEST = """
apiVersion: marlaas.dev/v1alpha1
kind: ModelPool
metadata: {name: fetched}
spec: {model: {hub: {id: some/tiny}}}
---
apiVersion: marlaas.dev/v1alpha1
kind: RLJob
metadata: {name: reverse, namespace: team-a}
spec: {poolRef: {name: fetched}, agents: [{name: policy, adapter: {targets: [qproj]}}], environment: {name: reverse}, training: {steps: 1}}
"""


@pytest.fixture
def hub() -> Iterator[Hub]:
    with serving(NAME, prepare("tiny")) as one:
        yield one


@pytest.fixture
def fetched(tmp_path: Path) -> Callable[..., tuple[str | None, list[str] | None, list[float], str | None]]:
    """Folder, error as (type, text), pauses, and what the cache then has."""

    def of(endpoint: str, name: str = NAME, revision: str = "main", **variables: str):
        environment = {"PATH": os.environ["PATH"], "HF_HOME": str(tmp_path / "hf"), "HF_ENDPOINT": endpoint} | variables
        environment |= {"PYTHONPATH": ":".join(filter(None, sys.path)), "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
        command = [sys.executable, "-c", FETCH, name, revision]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1])

    return of


def test_a_model_is_fetched_once_and_then_works_without_the_hub(hub: Hub, fetched) -> None:
    folder, error, pauses, found = fetched(hub.url, revision="v1")
    assert (error, pauses, found) == (None, [], folder)
    assert Path(folder).name == COMMIT
    assert inspect(Path(folder)) == inspect(prepare("tiny"))
    asked = len(hub.asked)
    assert fetched(hub.url, revision="v1")[0] == folder
    assert not any(" /some/tiny/resolve/" in one for one in hub.asked[asked:]), "no file is fetched again"
    hub.shutdown()
    hub.server_close()
    assert fetched(hub.url, revision="v1")[0] == folder
    assert fetched(hub.url, revision="v1", HF_HUB_OFFLINE="1")[0] == folder


def test_a_hub_that_is_busy_for_a_moment_delays_and_no_more(hub: Hub, fetched) -> None:
    hub.refusals = [(429, ""), (500, "")]
    folder, error, pauses, _ = fetched(hub.url)
    assert error is None
    assert Path(folder).is_dir()
    assert pauses == [1.0, 2.0]


DENIED = "or denies access to it: check the name, and if the model is private, set HF_TOKEN"
ADVICE = "connect this machine to the network, set HF_ENDPOINT to a hub that it can reach, or use a folder (path)"
REFUSED = {
    "it stays broken": (
        "HubUnavailable",
        f"model {NAME}@main cannot be fetched from the hub (it answers 500, after 4 attempts)",
    ),
    "it is not there": ("HubUnavailable", f"{ADVICE} or a builtin"),
    "offline by choice": ("HubUnavailable", "hf/hub, and HF_HUB_OFFLINE forbids downloads"),
    "no such model": ("UnknownModel", f"the hub has no model some/tyni@main, {DENIED}"),
    "no such revision": ("UnknownModel", "the hub has no revision some/tiny@v9; give a branch, a tag or a commit"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_model_that_cannot_be_fetched_is_told_with_what_to_do(hub: Hub, fetched, case: str) -> None:
    hub.refusals = [(500, "")] * (100 * (case == "it stays broken"))
    if case == "it is not there":
        hub.shutdown()
        hub.server_close()
    name, revision = NAME if case != "no such model" else "some/tyni", "v9" if case == "no such revision" else "main"
    offline = {"HF_HUB_OFFLINE": "1"} if case == "offline by choice" else {}
    _, (kind, text), pauses, found = fetched(hub.url, name, revision, **offline)
    wanted, words = REFUSED[case]
    assert (kind, words in text, found) == (wanted, True, None), text
    assert pauses == ([1.0, 2.0, 4.0] if case in ("it stays broken", "it is not there") else []), (
        "it is not asked twice in vain"
    )
    assert hub.asked == [] if offline else hub.asked or case == "it is not there"


def test_a_gated_model_needs_the_token_of_somebody_who_may_read_it(hub: Hub, fetched) -> None:
    hub.private = "right"
    _, (kind, text), _, _ = fetched(hub.url)
    advice = "accept its terms on its page, then set HF_TOKEN to a token that may read it"
    assert (kind, text) == ("UnknownModel", f"model {NAME}@main is gated on the hub: {advice}")
    _, (_, text), _, _ = fetched(hub.url, HF_TOKEN="wrong")
    assert text.endswith("set HF_TOKEN to a token that may read it; the current token may not")
    assert fetched(hub.url, HF_TOKEN="right")[1] is None


def test_a_cache_that_cannot_be_written(hub: Hub, fetched, tmp_path: Path) -> None:
    (tmp_path / "hf").write_text("a file, where the cache should be")
    _, (kind, text), pauses, _ = fetched(hub.url)
    assert (kind, pauses) == ("CacheUnusable", [])
    assert text == f"cannot write into the hub's cache {tmp_path}/hf/hub: set HF_HOME to a folder that can be written"


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_is_told_at_once_even_deep_within_the_hubs_own_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, number: int
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    pauses: list[float] = []

    def full(*_: str) -> Path:
        try:
            raise OSError(number, os.strerror(number))
        except OSError as error:
            raise RuntimeError("Data processing error") from error

    monkeypatch.setattr(models_hub, "_download", full)
    with pytest.raises(CacheFull, match=f"the disk of the hub's cache {tmp_path} is full: free space, or set HF_HOME"):
        fetch(NAME, "main", pauses.append)
    assert pauses == []


def test_a_model_that_had_to_be_fetched_is_looked_into_before_anything_is_started(hub: Hub, tmp_path: Path) -> None:
    manifest = tmp_path / "job.yaml"
    manifest.write_text(MANIFEST)
    variables = {"HF_HOME": str(tmp_path / "hf"), "HF_ENDPOINT": hub.url, "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    command = [sys.executable, "-m", "marlaas", "run", str(manifest), "--out", str(tmp_path / "out")]
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    done = subprocess.run(command, env=os.environ | variables, **streams, text=True, check=False)
    assert done.returncode == 2, done.stdout
    assert "job.yaml:10:" in done.stdout
    assert "did you mean 'q_proj'?" in " ".join(done.stdout.split())
    assert not list((tmp_path / "out").rglob("*.log"))
