"""Environment variables of environment code."""

from collections.abc import Mapping

ENVIRONMENT_PREFIX = "MARLAAS_ENVIRONMENT_"
_INHERITED = ("HOME", "LANG", "LD_LIBRARY_PATH", "LOGNAME", "PATH", "PYTHONPATH", "TZ", "USER", "VIRTUAL_ENV")
FIXED = {
    "PYTHONHASHSEED": "0",  # the same task finds the same content in every sandbox
    "PYTHONUNBUFFERED": "1",  # output printed before a crash is not lost
    "OMP_NUM_THREADS": "1",  # one core per episode: there are many
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
}


def clean_variables(variables: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of the fork server: an allow-list of the supervisor's, without credentials, and `FIXED`."""
    harmless = {k: v for k, v in variables.items() if k in _INHERITED or k.startswith("LC_")}
    return {**harmless, **FIXED}


def given_variables(variables: Mapping[str, str]) -> dict[str, str]:
    """Return the variables meant for environment code: `MARLAAS_ENVIRONMENT_X` becomes `X`.

    They carry the job's secrets. Set them only once the process is secluded: LD_PRELOAD or PYTHONPATH would
    otherwise run tenant code before that.
    """
    return {k.removeprefix(ENVIRONMENT_PREFIX): v for k, v in variables.items() if k.startswith(ENVIRONMENT_PREFIX)}
