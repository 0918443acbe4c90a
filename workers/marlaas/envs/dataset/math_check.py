"""Gateway to math-verify: compares two answers as mathematics, in a child process with a time limit, because its parser can hang.

The child is forked for each comparison, from a process that has imported the library: an episode's processes end with it, and
a fork takes milliseconds. Within the limit, the result is that of `parse` and `verify` with their defaults.
"""

import contextlib
import math
import os
import resource
import select
import signal
from collections.abc import Callable
from functools import cache
from importlib import import_module
from logging import ERROR, getLogger

CPU_S = 5
"""Processor time of a comparison, as math-verify's own limit."""
_WALL_S = 4.0 * CPU_S
_MARKS = ("$", "\\boxed", "\\(", "\\[")
_OVER_TIME = -signal.SIGXCPU
_ANSWERS = {b"0": False, b"1": True}


class MathCheckFailed(Exception):
    """The child process failed; nothing is known about the answer."""


@cache
def load() -> None:
    """Import math-verify and compare once, which takes seconds, so that the children need not: it compiles its patterns then."""
    import_module("math_verify")
    getLogger("math_verify").setLevel(ERROR)  # it warns that its own time limit is off
    for truth, reply in (("2", "so 2"), ("\\frac{1}{2}", "$\\frac{2}{4}$"), ("(1, 2]", "\\boxed{\\{1, 2\\}}")):
        compare(truth, reply)


def is_equal(truth: str, reply: str) -> bool | None:
    """Return whether the answer in a reply equals the truth; None if the comparison was stopped at the time limit.

    Raises MathCheckFailed.
    """
    if not reply.strip():
        return False  # as math-verify says, which reads the truth for it
    load()
    return _in_child(lambda: compare(truth, reply), CPU_S, _WALL_S)


def compare(truth: str, reply: str) -> bool:
    """Compare in this process, without a time limit."""
    from math_verify import parse, verify

    gold, answer = (parse(text, parsing_timeout=None) for text in (marked(truth), reply))
    return bool(verify(gold, answer, timeout_seconds=None))


def marked(truth: str) -> str:
    """Return a truth as math-verify expects it: LaTeX between dollars, unless it is marked already."""
    return truth if any(mark in truth for mark in _MARKS) else f"${truth}$"


def _in_child(compute: Callable[[], bool], cpu_s: int, wall_s: float) -> bool | None:
    """Return the result of a function that runs in a forked process; None if it exceeds a time limit. Raises MathCheckFailed."""
    ours, theirs = os.pipe()
    try:
        pid = os.fork()
    except OSError as error:
        os.close(ours)
        os.close(theirs)
        raise MathCheckFailed(f"math-verify's process cannot be started: {error.strerror}") from error
    if pid == 0:
        _answer(compute, theirs, cpu_s)
    os.close(theirs)
    in_time = False
    try:
        in_time = bool(select.select([ours], [], [], wall_s)[0])
        said = os.read(ours, 1) if in_time else b""
    finally:
        os.close(ours)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL if not in_time else 0)
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if said in _ANSWERS:
        return _ANSWERS[said]
    if not in_time or status == _OVER_TIME:
        return None
    raise MathCheckFailed(f"math-verify's process ended with exit code {status} and without a result")


def _answer(compute: Callable[[], bool], pipe: int, cpu_s: int) -> None:
    """In the child: write the result and exit."""
    status = 1
    try:
        signal.signal(signal.SIGXCPU, signal.SIG_DFL)
        hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
        most = cpu_s + math.ceil(sum(resource.getrusage(resource.RUSAGE_SELF)[:2]))
        resource.setrlimit(resource.RLIMIT_CPU, (most, hard))
        os.write(pipe, b"1" if compute() else b"0")
        status = 0
    finally:
        os._exit(status)
