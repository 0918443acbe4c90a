"""Process of one program: reads its orders, restricts itself, confirms that, and runs the program in the same interpreter.

`program` starts it as a new interpreter (`python -S -P -c "…"`). It is never forked, so it shares no memory with
the episode and cannot find the answer there. This package is imported as `locked`. It imports only its own modules
and standard modules that import quickly, because every turn that runs a program pays for the start.

The orders are a marshalled dict on standard input. LOCKED is written to the descriptor `ready`, which is closed
before the program's first line runs, so that the program cannot forge it. Standard output and standard error of the
program both go to standard output.
"""

from __future__ import annotations

import io
import marshal
import os
import sys

from . import privileges, seccomp

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import TracebackType
    from typing import Any, NoReturn

LOCKED = b"locked"
NAME = "program.py"
_OURS = str(__package__)
_STDLIB_WITHOUT = ("site-packages", "dist-packages")


def main() -> NoReturn:
    """Restrict the process and run the program. Exits with 0, with 1 after an exception, or with the program's own exit code."""
    orders = marshal.load(sys.stdin.buffer)
    _lock(orders)
    os.write(orders["ready"], LOCKED)
    os.close(orders["ready"])
    _end(_run(orders["program"]))


def _lock(orders: dict[str, Any]) -> None:
    """Restrict the process. The order matters.

    Namespaces need capabilities, Landlock needs no-new-privileges, and the seccomp filter forbids all of these calls.
    """
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    sys.stdin = io.TextIOWrapper(io.FileIO(0, closefd=False), encoding="utf-8")
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(encoding="utf-8", errors="backslashreplace", line_buffering=True)  # type: ignore[union-attr]
    readable = readable_paths()
    privileges.limit_resources(orders["cpu_s"], orders["memory_bytes"], orders["file_bytes"])
    privileges.leave_namespaces()
    privileges.give_up_privileges(orders["parent"])
    privileges.restrict_files(readable, ".")
    seccomp.install()


def readable_paths() -> list[str]:
    """Return the paths that a program may read: the standard library without installed packages, system libraries, time zones."""
    library = os.__file__.rpartition("/")[0]
    modules = [entry.path for entry in os.scandir(library) if entry.name not in _STDLIB_WITHOUT]
    multiarch = getattr(sys.implementation, "_multiarch", "")
    system = [f"{root}/{multiarch}" for root in ("/lib", "/usr/lib") if multiarch]
    return [*modules, *system, "/lib64", "/usr/lib64", "/etc/ld.so.cache", "/usr/share/zoneinfo"]


def _run(program: str) -> int:
    """Run the program as a script, with our modules and environment variables removed; return the exit code."""
    _hide()
    sys.argv = [NAME]
    try:
        code = compile(program, NAME, "exec", dont_inherit=True)
        exec(code, {"__name__": "__main__", "__builtins__": __builtins__})
    except SystemExit as end:
        return _exit_code(end)
    except BaseException as error:
        _report(error, program)
        return 1
    return 0


def _hide() -> None:
    os.environ.clear()
    for name in [name for name in sys.modules if name.split(".")[0] == _OURS]:
        del sys.modules[name]


def _report(error: BaseException, program: str) -> None:
    """Print the traceback, starting at the program's own first frame."""
    import linecache
    import traceback

    linecache.cache[NAME] = (len(program), None, program.splitlines(keepends=True), NAME)
    here: TracebackType | None = error.__traceback__
    while here is not None and here.tb_frame.f_code.co_filename != NAME:
        here = here.tb_next
    traceback.print_exception(type(error), error, here, chain=False)


def _exit_code(end: SystemExit) -> int:
    if end.code is None or isinstance(end.code, int):
        return (end.code or 0) & 0xFF
    print(end.code, file=sys.stderr)  # noqa: T201  # what Python itself does
    return 1


def _end(code: int) -> NoReturn:
    """Exit at once, without the interpreter's cleanup: exit handlers might hang."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except Exception:  # the stream is closed by the program, or full
            code = code or 1
    os._exit(code)
