"""Hides the supervisor's credential from its children, which run as the same user, and chooses their environment variables.

Landlock allows reading everywhere except below one path. Any Landlock domain also denies access to processes outside
it (their memory and open files). Without kernel support (before Linux 5.19, or disabled) nothing is restricted.
"""

import contextlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from marlaas.envs.locked import landlock

ENVIRONMENT_PREFIX = "MARLAAS_ENVIRONMENT_"
_INHERITED = (
    *("HOME", "LANG", "LD_LIBRARY_PATH", "LOGNAME", "PATH", "PYTHONPATH", "TZ", "USER", "VIRTUAL_ENV"),
    *("MARLAAS_CACHE", "XDG_CACHE_HOME", "HF_HOME", "HF_HUB_CACHE"),  # the caches of data sets
    *("AWS_ENDPOINT_URL", "AWS_ENDPOINT"),  # the store whose objects the cache has
)
FIXED = {
    "PYTHONHASHSEED": "0",  # the same task finds the same content in every sandbox
    "PYTHONUNBUFFERED": "1",  # output printed before a crash is not lost
    "OMP_NUM_THREADS": "1",  # one core per episode: there are many
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
}


def clean_variables(variables: Mapping[str, str]) -> dict[str, str]:
    """Return the fork server's environment variables: of the supervisor's, those on an allow-list without credentials, and `FIXED`."""
    harmless = {k: v for k, v in variables.items() if k in _INHERITED or k.startswith("LC_")}
    return {**harmless, **FIXED}


def given_variables(variables: Mapping[str, str]) -> dict[str, str]:
    """Return the variables meant for environment code: `MARLAAS_ENVIRONMENT_X` becomes `X`.

    They carry the job's secrets. Set them only once the process is secluded: LD_PRELOAD or PYTHONPATH would
    otherwise run tenant code in a process that is not secluded yet.
    """
    return {k.removeprefix(ENVIRONMENT_PREFIX): v for k, v in variables.items() if k.startswith(ENVIRONMENT_PREFIX)}


_FIRST_WITH_REFER = 2
"""Before this Landlock version, a restricted process cannot rename between folders, which environments need."""


def secluded(creds: Path) -> Path | None:
    """Return the path to hide from child processes; None if the credential is an open descriptor (`/dev/fd/N`) and has no path.

    The path is the credential file itself, or, if that is a symlink as in a mounted Secret, its folder. creds: path of the credential file.
    """
    if creds.is_relative_to("/dev/fd"):
        return None
    return creds.absolute().parent if creds.is_symlink() else creds.absolute()


def seclude(path: Path | None) -> bool:
    """Restrict this process and its descendants for good; return False if the kernel does not support it.

    path: file or folder whose files can then not be read; None: all files stay readable. In either case the restricted processes have no
        access to the memory and open files of other processes.
    """
    if landlock.version() < _FIRST_WITH_REFER:
        return False
    ruleset = landlock.create_ruleset(landlock.READ_FILE | landlock.REFER)
    for allowed in [Path("/")] if path is None else beside(path):
        with contextlib.suppress(
            OSError
        ):  # removed meanwhile, or not accessible to us: nothing there can be read anyway
            landlock.allow(ruleset, str(allowed), landlock.READ_FILE | landlock.REFER, os.O_NOFOLLOW)
    landlock.restrict_self(ruleset)
    return True


def beside(path: Path) -> Iterator[Path]:
    """Yield the siblings of `path` and of each of its parents, for Landlock's allow rules.

    So every file may be read, except `path` itself or the files below it.

    Symlinks are skipped: access is checked at their targets.
    """
    way = path.resolve()
    while way != way.parent:
        yield from (entry for entry in way.parent.iterdir() if entry != way and not entry.is_symlink())
        way = way.parent
