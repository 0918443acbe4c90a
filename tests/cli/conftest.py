"""A right manifest, and what is said when it is edited."""

from collections.abc import Callable
from pathlib import Path

import pytest

from marlaas.manifest import InvalidManifest, load

MANIFEST = """\
apiVersion: marlaas.dev/v1alpha1
kind: ModelPool
metadata: {name: tiny}
spec:
  model: {builtin: tiny}
  maxRank: 16
  adapterSlots: 8
---
apiVersion: marlaas.dev/v1alpha1
kind: Tenant
metadata: {name: red}
spec: {namespaces: [team-a]}
---
apiVersion: marlaas.dev/v1alpha1
kind: RLJob
metadata: {name: sums, namespace: team-a}
spec:
  poolRef: {name: tiny}
  environment: {name: reverse}
  rollout: {groupSize: 4}
  training: {steps: 3}
"""


@pytest.fixture
def manifest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Writes the right manifest, edited, into an empty folder, which is also the working directory."""
    monkeypatch.chdir(tmp_path)

    def write(*edits: tuple[str, str]) -> Path:
        text = MANIFEST
        for old, new in edits:
            assert text.count(old) == 1, f"{old!r} must stand once"
            text = text.replace(old, new)
        Path("job.yaml").write_text(text, encoding="utf-8")
        return Path("job.yaml")

    return write


@pytest.fixture
def complaints(manifest: Callable[..., Path]) -> Callable[..., list[str]]:
    """What is said of the manifest after edits, one line per error."""

    def of(*edits: tuple[str, str], runnable: bool = True) -> list[str]:
        path = manifest(*edits)
        try:
            load([path], runnable=runnable)
        except InvalidManifest as error:
            return str(error).splitlines()
        return []

    return of
