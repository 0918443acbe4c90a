"""What `marlaas run` refuses: with one sentence, exit code 2, and nothing started."""

import functools
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.models.model_folders import write_model

from marlaas.cli import main
from marlaas.local import server

Ended = tuple[int, str, str]


@pytest.fixture
def marlaas(
    manifest: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> Callable[..., Ended]:
    """Runs the command on the right manifest after edits, in a folder with a (hollow) model; returns exit code and outputs."""
    write_model(tmp_path / "model")
    # A server that is not there yet is waited for; here no longer than it takes to see that.
    monkeypatch.setattr(server, "connect", functools.partial(server.connect, connect_timeout_s=0.5))

    def run(*options: str, edit: str = "model: {path: model}") -> Ended:
        manifest(edit)
        monkeypatch.setattr(sys, "argv", ["marlaas", "run", "job.yaml", *options])
        with pytest.raises(SystemExit) as caught:
            main()
        said = capfd.readouterr()
        return int(caught.value.code or 0), said.out, said.err

    return run


def test_a_wrong_field_is_told_by_file_and_line_and_no_folder_is_made(marlaas, tmp_path):
    assert marlaas(edit="environment: {name: solver-verifier}") == (
        2,
        "",
        "job.yaml:19: spec.environment.args: environment 'solver-verifier' needs the agents solver, verifier; "
        "the job lacks solver, verifier (its agents: policy)\n",
    )
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (("--out", "job.yaml"), "a file exists where a folder is needed: choose another folder"),
        (("--out", "/proc/here/out"), "cannot be written"),
        (("--nats", "nats://127.0.0.1:1"), "127.0.0.1:1"),
        (("--seed", "-1"), "--seed"),
        (("--seed", str(2**53)), "--seed"),
        (("another.yaml",), "another.yaml"),
    ],
)
def test_an_option_that_cannot_be_used_is_told(marlaas, options, sentence):
    code, _, said = marlaas(*options)
    assert code == 2
    assert sentence in said


def test_a_file_that_is_no_nats_server_is_told(marlaas):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        code, _, said = marlaas("--nats", f"nats://127.0.0.1:{listener.getsockname()[1]}")
    assert code == 2
    assert str(listener) not in said


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small disk needs root")
def test_a_nearly_full_disk_is_told_with_the_number(marlaas, tmp_path):
    (tmp_path / "small").mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", tmp_path / "small"]
    mounted = subprocess.run(command, check=False, capture_output=True)
    if mounted.returncode != 0:
        pytest.skip(f"this machine does not let us mount a small disk: {mounted.stderr.decode().strip()}")
    try:
        code, _, said = marlaas("--out", "small/out")
    finally:
        subprocess.run(["umount", tmp_path / "small"], check=True)
    assert code == 2
    assert "MiB are free, and a run needs at least 256 MiB: free space" in said
