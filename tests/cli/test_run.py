"""What `marlaas run` refuses: with one sentence, exit code 2, and nothing started."""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.models.model_folders import write_model

# A server that is not there yet is waited for; here no longer than it takes to see that.
HASTY = (
    "import functools, sys, marlaas.local.server as server\n"
    "from marlaas.cli import main\n"
    "server.connect = functools.partial(server.connect, connect_timeout_s=0.5)\n"
    "sys.exit(main())"
)


@pytest.fixture
def marlaas(manifest: Callable[..., Path], tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs the command on the right manifest after edits, in a folder with a (hollow) model."""
    write_model(tmp_path / "model")

    def run(*options: str, edit: str = "model: {path: model}") -> subprocess.CompletedProcess[str]:
        manifest(edit)
        program = [sys.executable, "-c", HASTY] if "--nats" in options else [Path(sys.executable).with_name("marlaas")]
        command = [*map(str, program), "run", "job.yaml", *options]
        return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)

    return run


def test_a_wrong_field_is_told_by_file_and_line_and_no_folder_is_made(marlaas, tmp_path):
    done = marlaas(edit="environment: {name: solver-verifier}")
    assert done.returncode == 2
    assert done.stderr.splitlines() == [
        "job.yaml:19: spec.environment.args: environment 'solver-verifier' needs the agents solver, verifier; "
        "the job lacks solver, verifier (its agents: policy)"
    ]
    assert done.stdout == ""
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
    done = marlaas(*options)
    assert done.returncode == 2
    assert sentence in done.stderr
    assert "Traceback" not in done.stderr


def test_a_file_that_is_no_nats_server_is_told(marlaas):
    with socket.create_server(("127.0.0.1", 0)) as server:
        done = marlaas("--nats", f"nats://127.0.0.1:{server.getsockname()[1]}")
    assert done.returncode == 2
    assert str(server) not in done.stderr
    assert "Traceback" not in done.stderr


def test_with_json_an_error_is_an_object_too(marlaas):
    done = marlaas("--json", "--out", "job.yaml")
    assert json.loads(done.stdout.splitlines()[-1])["type"] == "error"


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small disk needs root")
def test_a_nearly_full_disk_is_told_with_the_number(marlaas, tmp_path):
    (tmp_path / "small").mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", "small"], check=False, capture_output=True
    )
    if mounted.returncode != 0:
        pytest.skip(f"this machine does not let us mount a small disk: {mounted.stderr.decode().strip()}")
    try:
        done = marlaas("--out", "small/out")
    finally:
        subprocess.run(["umount", "small"], check=True)
    assert done.returncode == 2
    assert "MiB are free, and a run needs at least 256 MiB: free space" in done.stderr


def test_help_teaches(marlaas):
    text = marlaas("--help").stdout
    for word in ("--out", "--seed", "--json", "--nats", "Ctrl-C", "Exit code"):
        assert word in text
