"""The command as people meet it: help, verdicts, exit codes, no tracebacks, and what `marlaas run` refuses before it starts."""

import errno
import functools
import json
import os
import socket
import subprocess
import sys

import pytest
from tests.cli.conftest import invoke
from tests.models.model_folders import write_model
from tests.tables import data, rows

from marlaas.cli import main
from marlaas.cli.app import COMMANDS, exit_code_of
from marlaas.cli.standard_files import LossyOutput
from marlaas.local import server
from marlaas_api.errors import InvalidInput, Permanent, Retryable


def _command(*arguments: str, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["marlaas", *arguments])
    with pytest.raises(SystemExit) as caught:
        main()
    code = caught.value.code
    return code if isinstance(code, int) else 0


def test_help_names_every_command_and_an_unknown_one_gets_the_nearest_name():
    result = invoke("--help")
    assert result.exit_code == 0
    assert all(name in result.output and command.summary in result.output for name, command in COMMANDS.items())
    assert "marlaas run examples/quickstart.yaml" in result.output
    shown, wrong = invoke("--version"), invoke("validat")
    assert (shown.exit_code, shown.output.split()[0]) == (0, "marlaas")
    assert (wrong.exit_code, "validate" in wrong.output) == (2, True)


def test_help_imports_nothing_that_takes_time():
    command = [sys.executable, "-c", data(__file__, "helps")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("name", [*COMMANDS, "models list", "models prepare"])
def test_every_commands_help_has_an_example_and_says_what_its_exit_code_means(name):
    result, command = invoke(*name.split(), "--help"), COMMANDS.get(name)
    said = " ".join(result.output.split())
    assert result.exit_code == 0, result.output
    assert f"Example: {command.example if command else f'marlaas {name}'}" in said
    assert command is None or command.is_group or "Exit code: 0 " in said


def test_a_cluster_that_nobody_asks_is_not_ignored_and_no_file_at_all_is_help(manifest, monkeypatch, capfd):
    assert _command("validate", str(manifest()), "--context", "prod", monkeypatch=monkeypatch) == 2
    assert "need --server" in capfd.readouterr().err
    assert _command("validate", monkeypatch=monkeypatch) == 2
    assert "marlaas validate examples/*.yaml" in capfd.readouterr().out


def test_ctrl_c_while_modules_load_is_no_traceback(monkeypatch):
    def interrupted(module):
        raise KeyboardInterrupt

    monkeypatch.setattr("marlaas.cli.app.import_module", interrupted)
    assert _command("why", "sums", monkeypatch=monkeypatch) == 130


def test_a_right_manifest_is_one_line_per_object(manifest):
    result = invoke("validate", str(manifest()))
    assert (result.exit_code, result.output) == (0, data(__file__, "right_manifest"))


@pytest.mark.parametrize(("workers", "options", "code", "lines"), rows(__file__, "memory"))
def test_the_plan_of_a_pools_memory_is_a_table_or_a_refusal(
    manifest, workers, options, code, lines, monkeypatch, capfd
):
    path = str(manifest(f"maxRank: 16\n  {workers}"))
    assert _command("validate", "--memory", *options, path, monkeypatch=monkeypatch) == code
    said = capfd.readouterr()[code // 2]
    assert [line for line in lines if line not in said] == []


def test_a_bad_manifest_is_told_on_standard_error_with_exit_code_2(manifest, monkeypatch, capfd):
    path = manifest("training: {stepz: 3}")
    assert _command("validate", str(path), monkeypatch=monkeypatch) == 2
    said = capfd.readouterr()
    assert said.out == ""
    assert said.err.splitlines() == [
        "job.yaml:21: spec.training.steps: required, but missing (Number of optimizer steps to train; may be raised later. 0: the job only evaluates version 0)",
        "job.yaml:21: spec.training.stepz: unknown field; did you mean 'steps'?",
    ]


def test_machines_get_errors_or_objects_and_notes_as_json(manifest):
    result = invoke("validate", "--json", str(manifest("training: {steps: -1}")))
    error = {"file": "job.yaml", "line": 21, "path": "spec.training.steps", "text": "must be at least 0, found -1"}
    assert (result.exit_code, json.loads(result.stdout)) == (2, {"valid": False, "errors": [error]})
    path = manifest(("apiVersion: marlaas.dev/v1alpha1\nkind: Tenant", "apiVersion: v1\nkind: Namespace"))
    result = invoke("validate", "--json", str(path))
    verdict = json.loads(result.stdout)
    assert (result.exit_code, verdict["valid"]) == (0, True)
    assert [one["name"] for one in verdict["objects"]] == ["tiny", "team-a/sums"]
    assert [note["line"] for note in verdict["notes"]] == [9]


FAILURES = [
    (InvalidInput("the seed is negative"), 2, "the seed is negative"),
    (Permanent("it cannot be"), 1, "it cannot be"),
    (Retryable("later perhaps"), 1, "later perhaps"),
    (OSError(errno.ENOSPC, "No space left on device", "/x/y"), 1, "/x/y: No space left on device"),
    (ZeroDivisionError("x"), None, None),
]


@pytest.mark.parametrize(("error", "code", "text"), FAILURES)
def test_a_foreseen_failure_is_one_sentence_and_another_keeps_its_traceback(capsys, error, code, text):
    assert exit_code_of(error) == code
    assert capsys.readouterr().err == (f"{text}\n" if text else "")


def test_a_reader_that_goes_away_is_no_traceback(manifest):
    reader = "import sys; sys.stdin.close()"
    command = f"{sys.executable} -m marlaas validate {manifest()} | {sys.executable} -c '{reader}'"
    done = subprocess.run(command, shell=True, capture_output=True, text=True, check=False)
    assert done.stderr == ""


def test_output_without_a_reader_is_dropped_and_nothing_else_fails_on_it():
    reading, writing = os.pipe()
    with os.fdopen(writing, "w") as file:
        output = LossyOutput(file)
        output.write("seen\n")
        output.flush()
        assert os.read(reading, 100) == b"seen\n"
        os.close(reading)
        for _ in range(3):
            assert output.write("lost\n") == len("lost\n")
            output.flush()
        assert output.is_lost
        print("also lost", file=file, flush=True)


def test_closed_standard_files_become_the_null_device():
    reading, writing = os.pipe()
    command, program = 'exec "$0" -c "$1" "$2" <&- >&- 2>&-', data(__file__, "without_files")
    done = subprocess.run(["sh", "-c", command, sys.executable, program, str(writing)], pass_fds=[writing], check=False)
    os.close(writing)
    with os.fdopen(reading) as file:
        assert file.read() == repr(["/dev/null"] * 3)
    assert done.returncode == 0


@pytest.fixture
def marlaas(manifest, tmp_path, monkeypatch, capfd):
    """Runs the command on the right manifest after edits, in a folder with a (hollow) model; returns exit code and outputs."""
    write_model(tmp_path / "model")
    # A server that is not there yet is waited for; here no longer than it takes to see that.
    monkeypatch.setattr(server, "connect", functools.partial(server.connect, connect_timeout_s=0.5))

    def run(*options: str, edit="model: {path: model}"):
        manifest(edit)
        code = _command("run", "job.yaml", *options, monkeypatch=monkeypatch)
        said = capfd.readouterr()
        return code, said.out, said.err

    return run


def test_a_wrong_field_is_told_by_file_and_line_and_no_folder_is_made(marlaas, tmp_path):
    assert marlaas(edit="environment: {name: solver-verifier}") == (2, "", data(__file__, "wrong_field"))
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(("options", "sentence"), rows(__file__, "options"))
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
