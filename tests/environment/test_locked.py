"""Programs that a policy wrote, locked up: what they try to break, and the filter of system calls on every architecture."""

import errno
import os
import re
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import pytest
from tests.killing import assert_gone
from tests.tables import data, rows

import marlaas.envs.locked.program as program_module
from marlaas.envs.locked import landlock
from marlaas.envs.locked.program import Limits, NotLocked, Ran, prove, run_program
from marlaas.envs.locked.seccomp import ARCHITECTURES, AUDIT_ARCH, NUMBERS, bpf, numbers

GENEROUS = Limits(cpu_s=30, wall_s=120)
IMPATIENT = Limits(cpu_s=20, wall_s=0.5)
PROGRAMS = data(__file__, "programs")


def run(*lines: str, limits=GENEROUS):
    return run_program("\n".join(lines), limits)


def unharmed():
    return run("print(6 * 7)") == Ran("42\n", 0)


def test_programs_print_exit_and_write_scratch_files_that_are_gone_afterwards():
    ran = run("import math, json, sqlite3, zlib", "print(json.dumps(math.factorial(20)), 'ä€😀')")
    assert (ran, ran.is_ok) == (Ran("2432902008176640000 ä€😀\n", 0), True)
    ends = {"import sys; sys.exit(3)": 3, "raise SystemExit": 0, "exit_ = 1 +": 1, "raise SystemExit('no')": 1}
    ends |= {"print('\ud800')": 1, "print(1)\0": 1}
    assert {line: run(line).exit_code for line in ends} == ends
    ran = run(PROGRAMS["divides"])
    assert ran.output.splitlines() == data(__file__, "traceback")
    assert (ran.exit_code, ran.stopped, ran.is_ok) == (1, None, False)
    said, listed, scratch = run(PROGRAMS["writes"]).output.strip().split("|")
    assert (said, listed) == ("hi", "['b']")
    assert not Path(scratch).exists()


REFUSED = dict(rows(__file__, "refused"))


def test_a_program_is_refused_whatever_it_tries_also_without_python():
    ran = run(f"lines = {list(REFUSED.values())!r}", PROGRAMS["tries"])
    assert dict(zip(REFUSED, ran.output.splitlines(), strict=True)) == dict.fromkeys(REFUSED, "PermissionError")
    assert ran.is_ok
    ran = run(PROGRAMS["tries without Python"])
    assert ran.output.replace("(-1, 1)", "no").split() == ["no"] * 5


def test_no_variable_module_descriptor_or_package_is_inherited(tmp_path, monkeypatch):
    monkeypatch.setenv("A_SECRET", "of the supervisor")
    ran = run("import os, sys", "print(dict(os.environ), [name for name in sys.modules if 'locked' in name])")
    assert ran.output == "{} []\n"
    with (tmp_path / "open").open("w") as file:
        os.set_inheritable(file.fileno(), True)
        ran = run(PROGRAMS["looks for files"])
    assert ran.output == "[0, 1, 2]\n"
    ran = run(f"print(open({pytest.__file__!r}).read())")
    assert ran.output.splitlines()[-1].startswith("PermissionError")
    assert "ModuleNotFoundError" in run("import marlaas").output


ONE_SECOND = Limits(cpu_s=1, wall_s=600)


@pytest.mark.parametrize(("program", "limits", "stopped", "num_printed"), rows(__file__, "stopped"))
def test_what_never_ends_or_crashes_is_stopped_and_told(program, limits, stopped, num_printed):
    ran = run(program, limits=globals()[limits])
    assert (ran.stopped, len(ran.output)) == (stopped, num_printed)
    assert unharmed()


def test_forking_and_allocating_without_end_are_contained():
    ran = run(PROGRAMS["forks"])
    assert set(ran.output.split()) == {"PermissionError", "RuntimeError"}
    ran = run("held = []", "while True: held.append(bytearray(1 << 20))")
    assert (ran.output.splitlines()[-1], ran.exit_code) == ("MemoryError", 1)
    assert "OSError: [Errno 27] File too large" in run("open('a', 'wb').write(bytes(2 << 20))").output
    assert unharmed()


def test_a_call_with_another_architectures_numbers_kills():
    """A 32-bit call from 64-bit code: mov eax, 20 (getpid); int 0x80; ret."""
    if os.uname().machine != "x86_64":
        pytest.skip("x86_64 only")
    ran = run(PROGRAMS["calls as 32-bit code"])
    assert (ran.stopped, ran.output) == ("it made a forbidden system call", "")


_ORPHANING = data(__file__, "orphaning")


def test_the_program_goes_when_its_parent_is_killed():
    with subprocess.Popen([sys.executable, "-c", _ORPHANING], stdout=subprocess.PIPE, text=True) as parent:
        child = os.pidfd_open(int(parent.stdout.readline()))
        parent.kill()
    assert_gone(child)


def without(folder, module, line, instead):
    """The command that starts a child, from a copy of the package that lacks a line."""
    package = Path(landlock.__file__).parent
    copy = shutil.copytree(package, folder / package.name)
    text = (copy / module).read_text()
    assert line in text
    (copy / module).write_text(text.replace(line, instead))
    return program_module._START.replace(str(package.parent), str(folder))


def test_a_kernel_without_landlock_runs_nothing(monkeypatch, tmp_path):
    """The child looks for Landlock under system calls that no kernel has."""
    start = without(tmp_path, "landlock.py", "= 444, 445, 446", "= 9444, 9445, 9446")
    monkeypatch.setattr(program_module, "_START", start)
    with pytest.raises(NotLocked, match=r"so none is run: OSError: the kernel has no Landlock"):
        run("open('ran', 'w')")


@pytest.mark.parametrize(("line", "found"), rows(__file__, "open_locks"))
def test_a_lock_that_is_left_open_is_found(line, found, monkeypatch, tmp_path):
    monkeypatch.setattr(program_module, "_START", without(tmp_path, "child.py", line, ""))
    with pytest.raises(NotLocked, match=f"not restricted: {found}"):
        prove()


@pytest.mark.parametrize("known", range(1, 7))
def test_older_kernels_locks_hold_too(known, monkeypatch, tmp_path):
    """The child takes the kernel for an older one, whose Landlock knows less."""
    if landlock.version() < known:
        pytest.skip(f"this kernel's Landlock is of version {landlock.version()}")
    start = without(tmp_path, "privileges.py", "    known = landlock.version()\n", f"    known = {known}\n")
    monkeypatch.setattr(program_module, "_START", start)
    prove()
    ran = run("import os, sys", "os.open(sys.executable, os.O_RDONLY | os.O_TRUNC)")
    assert ran.output.splitlines()[-1].startswith("PermissionError: [Errno 1]")
    ran = run("open('a', 'w').write('abc')", "open('a', 'w').write('d')", "print(open('a').read())")
    assert ran.output == "d\n"


def test_it_needs_no_privileges_at_all():
    """Without any capability, as in a pod that drops all of them; the network namespace may then be missing."""
    command = [sys.executable, "-c", data(__file__, "unprivileged")]
    ended = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "CapEff:\t0000000000000000" in ended.stdout
    assert "NoNewPrivs:\t1" in ended.stdout


PID = 4711
ALLOW, KILL, REFUSE = 0x7FFF0000, 0x80000000, 0x00050000 | errno.EPERM
HEADERS = {
    "x86_64": (Path("/usr/include/x86_64-linux-gnu/asm/unistd_64.h"), r"#define __NR_(\w+) (\d+)"),
    "aarch64": (Path("/usr/include/asm-generic/unistd.h"), r"#define __NR(?:3264)?_(\w+) (\d+)"),
}
NEVER = dict(rows(__file__, "never_allowed"))  # fmt: skip


def decide(machine, number, *arguments: int, arch=None):
    """What the filter says of a call: the instructions that it uses, as Linux runs them."""
    words = (*arguments, *[0] * (6 - len(arguments)))
    data = struct.pack("=IIQ6Q", number, arch or AUDIT_ARCH[machine], 0, *words)
    code, at, held = list(struct.iter_unpack("=HBBI", bpf(machine, PID))), 0, 0
    while True:
        operation, skip_if, skip_else, value = code[at]
        at += 1
        if operation == 0x20:
            held = struct.unpack_from("=I", data, value)[0]
        elif operation == 0x54:
            held &= value
        elif operation == 0x15:
            at += skip_if if held == value else skip_else
        else:
            assert operation == 0x06
            return int(value)


@pytest.mark.parametrize("machine", ARCHITECTURES)
def test_only_what_is_listed_is_allowed_and_for_the_process_itself_and_harmless_purposes(machine):
    call = numbers(machine)
    assert all(decide(machine, number) == REFUSE for number in range(600) if number not in call.values())
    assert [name for name, number in NEVER[machine].items() if decide(machine, number) != REFUSE] == []
    assert decide(machine, call["read"]) == decide(machine, call["mmap"]) == ALLOW
    for name in ("kill", "tgkill"):
        assert [decide(machine, call[name], pid) for pid in (PID, 1, 0, 2**64 - 1)] == [ALLOW, REFUSE, REFUSE, REFUSE]
    assert [decide(machine, call["prlimit64"], pid) for pid in (0, 1)] == [ALLOW, REFUSE]
    set_owner, set_signal, close_on_exec, push_input = 8, 10, 2, 0x5412
    answers = [decide(machine, call["fcntl"], 1, command) for command in (set_owner, set_signal, close_on_exec)]
    assert answers == [REFUSE, REFUSE, ALLOW]
    assert decide(machine, call["ioctl"], 0, push_input) == REFUSE
    read_and_empty, write_and_empty = 0o1000, 0o1001
    assert decide(machine, call["openat"], 0, 0, read_and_empty) == REFUSE
    assert decide(machine, call["openat"], 0, 0, write_and_empty) == ALLOW
    assert decide(machine, 0, arch=0x40000003) == KILL, "a call of a foreign architecture"
    assert decide("x86_64", 0x40000000) == REFUSE, "an x32 call"


def test_an_unknown_architecture_is_refused_loudly():
    with pytest.raises(RuntimeError, match="x86_64 and aarch64; this machine is 'riscv64'"):
        bpf("riscv64", PID)


@pytest.mark.parametrize(("column", "machine"), enumerate(ARCHITECTURES))
def test_the_numbers_are_those_of_the_headers(column, machine):
    path, line = HEADERS[machine]
    if not path.exists():
        pytest.skip(f"{path} is missing (linux-libc-dev)")
    known = {name: int(number) for name, number in re.findall(line, path.read_text())}
    known.setdefault("newfstatat", known.get("fstatat", -1))
    assert {name: row[column] for name, row in NUMBERS.items()} == {name: known.get(name) for name in NUMBERS}
