"""`python -m marlaas_worker`: arguments, log, exit codes. Draining and dying with the runner: test_runner."""

import argparse
import asyncio
import io
import logging
import os
import subprocess
import sys

import pytest
from tests.tables import data, rows

from marlaas_api.errors import InvalidInput
from marlaas_worker import __main__ as entry
from marlaas_worker.__main__ import OneRecordFormatter, _LogHandler, main


def test_a_record_is_one_line_with_time_level_and_role_and_further_lines_are_indented():
    record = logging.LogRecord("engine", logging.WARNING, "x.py", 1, "slow: %d", (3,), None)
    record.created, record.msecs = 0.0, 7.0
    line = OneRecordFormatter("rollout-0").format(record)
    assert line == "1970-01-01T00:00:00.007Z WARNING rollout-0 engine: slow: 3"
    record = logging.LogRecord("engine", logging.ERROR, "x.py", 1, "one\ntwo", (), None)
    assert OneRecordFormatter("r").format(record).splitlines()[1] == "    two"


@pytest.mark.parametrize("arguments", [[], ["--help"], ["gardener"], ["rollout"]])
def test_wrong_arguments_are_told_with_the_usage(arguments, capsys):
    with pytest.raises(SystemExit):
        main(arguments)
    told = capsys.readouterr()
    assert "python -m marlaas_worker" in told.out + told.err


async def test_sandboxes_of_one_process_write_to_their_own_logs_and_end_with_their_own_codes(monkeypatch):
    async def serve(options, stop):
        await stop.wait()
        logging.getLogger("x").warning("of %s", options.name)
        if options.name == "two":
            raise InvalidInput("no such environment")

    own, common, stop = {name: io.StringIO() for name in ("one", "two")}, io.StringIO(), asyncio.Event()
    handler = _LogHandler(common)
    monkeypatch.setattr(entry, "_serve", serve)
    monkeypatch.setattr(logging.getLogger(), "handlers", [handler])
    words = ["sandbox", "--nats", "x", "--blobs", "x", "--scratch", "x", "--name"]
    running = [asyncio.create_task(entry._run_in_host([*words, name], own[name], stop)) for name in own]
    logging.getLogger("x").warning("of none")
    stop.set()
    assert await asyncio.gather(*running) == [0, 2]
    assert common.getvalue() == "of none\n"
    assert [[name for name in own if f"of {name}" in log.getvalue()] for log in own.values()] == [["one"], ["two"]]
    assert "CRITICAL two marlaas_worker: no such environment" in own["two"].getvalue()


# A server that is not there yet is waited for; here no longer than it takes to see that.
HASTY = data(__file__, "hasty")


@pytest.mark.processes
def test_a_role_crashes_without_its_server_and_does_not_begin_without_its_runner(tmp_path, monkeypatch):
    places = ["--blobs", str(tmp_path), "--scratch", str(tmp_path)]
    command = [sys.executable, "-c", HASTY, "orchestrator", "--nats", "nats://127.0.0.1:1", "--name", "x", *places]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1
    assert "CRITICAL x marlaas_worker: " in done.stderr
    assert "127.0.0.1:1" in done.stderr
    monkeypatch.setenv("MARLAAS_PARENT_PID", "1")
    assert subprocess.run(command, capture_output=True, timeout=120, check=False).returncode == -9


@pytest.mark.processes
@pytest.mark.parametrize(("role", "variable", "value"), rows(__file__, "memory_limits"))
def test_a_role_limits_its_memory_unless_the_user_has_chosen(role, variable, value, monkeypatch):
    for chosen in ("7", None):
        monkeypatch.setenv(variable, chosen or "")
        if chosen is None:
            monkeypatch.delenv(variable)
        with pytest.raises(InvalidInput):
            entry._role(argparse.Namespace(role=role, pool_file=None), None)
        assert os.environ[variable] == (chosen or value)
