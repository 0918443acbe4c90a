"""Failures to sentences on standard error and exit codes; nobody sees a traceback of what was foreseen."""

import os
import sys

from marlaas_api.errors import InvalidInput, MarlaasError

FAILED, INVALID, INTERRUPTED = 1, 2, 130


def exit_code_of(error: Exception) -> int | None:
    """Tell the person what happened and return the exit code; None, and no word, for what nobody foresaw."""
    if isinstance(error, BrokenPipeError):
        _close_output()
        return FAILED
    if isinstance(error, MarlaasError):
        complain(str(error))
        return INVALID if isinstance(error, InvalidInput) else FAILED
    if isinstance(error, OSError) and error.strerror:
        complain(f"{error.filename}: {error.strerror}" if error.filename else error.strerror)
        return FAILED
    return None


def complain(text: str) -> None:
    """Write to standard error, past any pretty printer: paths and lines stay whole."""
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


def _close_output() -> None:
    """Keep Python from flushing into the closed pipe once more at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
