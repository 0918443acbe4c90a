"""A real API server that knows the kinds, and the command as a person runs it against that server."""

import hashlib
import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from marlaas.cli import main
from marlaas_e2e import binaries
from marlaas_e2e.control_plane import ControlPlane

BOTH = Path(__file__).with_name("manifests.yaml").read_text(encoding="utf-8")
JOB = BOTH.partition("---\n")[2]


@dataclass(frozen=True, slots=True)
class Said:
    """What a command printed, and its exit code."""

    code: int
    out: str
    err: str


@dataclass(frozen=True, slots=True)
class Shell:
    """A person's terminal: a namespace of their own, kubectl on PATH, the administrator's kubeconfig."""

    plane: ControlPlane
    namespace: str
    run: Callable[..., Said]
    job: str = JOB
    both: str = BOTH

    def write(self, text: str = JOB, name: str = "job.yaml") -> str:
        """A manifest in the working directory; POOL stands for a pool of this test's own."""
        Path(name).write_text(text.replace("POOL", self.namespace), encoding="utf-8")
        return name

    def objects(self) -> list[dict[str, Any]]:
        """Pool and job, in this test's namespace."""
        return [*yaml.safe_load_all(self.both.replace("POOL", self.namespace))]

    def submit(self, text: str = JOB) -> None:
        """Submit, as a test's first step."""
        said = self.run("submit", self.write(text))
        assert said.code == 0, said.err

    def set_status(self, kind: str, name: str, status: dict[str, Any]) -> None:
        """Say what the operator would say."""
        patch = json.dumps({"status": status})
        self.kubectl("patch", kind, name, "--subresource=status", "--type=merge", f"--patch={patch}")

    def get(self, kind: str, name: str) -> dict[str, Any]:
        return json.loads(self.kubectl("get", kind, name, "--output=json"))

    def kubectl(self, *arguments: str) -> str:
        return self.plane.kubectl(*arguments, f"--namespace={self.namespace}")


@pytest.fixture
def shell(
    control_plane: ControlPlane,
    request: pytest.FixtureRequest,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Shell:
    """A terminal whose context has a namespace of this test's own."""
    plane, namespace = control_plane, f"t{hashlib.sha256(request.node.nodeid.encode()).hexdigest():.12}"
    plane.kubectl("create", "namespace", namespace)
    kubeconfig = tmp_path / "kubeconfig"
    kubeconfig.write_text(plane.kubeconfig.read_text())
    plane.kubectl("config", "set-context", "--current", f"--namespace={namespace}", kubeconfig=kubeconfig)
    monkeypatch.setenv("KUBECONFIG", str(kubeconfig))
    monkeypatch.setenv("PATH", f"{binaries.path('kubectl').parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str, entry: Callable[[], None] = main) -> Said:
        capsys.readouterr()
        monkeypatch.setattr(sys, "argv", ["marlaas", *arguments])
        with pytest.raises(SystemExit) as caught:
            entry()
        printed = capsys.readouterr()
        code = caught.value.code
        return Said(code if isinstance(code, int) else 0, printed.out, printed.err)

    return Shell(plane, namespace, run)
