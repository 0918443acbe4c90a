"""Output whose reader has gone, and standard files that are closed."""

import os
import subprocess
import sys

from marlaas.cli.standard_files import LossyOutput


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
    program = (
        "import os, sys, marlaas.cli.standard_files as files; files.open_closed_descriptors(); "
        "os.write(int(sys.argv[1]), repr([os.readlink(f'/proc/self/fd/{n}') for n in range(3)]).encode()); "
        "print('to nobody'); sys.exit(bool(sys.stdin.read()))"
    )
    reading, writing = os.pipe()
    command = 'exec "$0" -c "$1" "$2" <&- >&- 2>&-'
    done = subprocess.run(["sh", "-c", command, sys.executable, program, str(writing)], pass_fds=[writing], check=False)
    os.close(writing)
    with os.fdopen(reading) as file:
        assert file.read() == repr(["/dev/null"] * 3)
    assert done.returncode == 0
