"""The filter of system calls, run by a small interpreter of BPF, so that what it decides on another architecture is known here too."""

import errno
import re
import struct
from pathlib import Path

import pytest
from tests.tables import rows

from marlaas.envs.locked.seccomp import ARCHITECTURES, AUDIT_ARCH, NUMBERS, bpf, numbers

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
