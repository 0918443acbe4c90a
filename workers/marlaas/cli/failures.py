"""Report errors on standard error and map them to exit codes. Expected errors show no traceback."""

import os
import sys

from marlaas_api.errors import InvalidInput, MarlaasError

FAILED, INVALID, INTERRUPTED = 1, 2, 130


def exit_code_of(error: Exception) -> int | None:
    """Print the error for the user and return the exit code; None, without output, for an unexpected error."""
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
    """Write to standard error, without Rich, so that paths and lines are not wrapped."""
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


def _close_output() -> None:
    """Redirect standard output to the null device, so that Python's flush at exit does not fail on the closed pipe."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
