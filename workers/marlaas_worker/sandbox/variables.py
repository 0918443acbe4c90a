"""Which environment variables environment code sees."""

from collections.abc import Mapping

ENVIRONMENT_PREFIX = "MARLAAS_ENVIRONMENT_"
_INHERITED = ("HOME", "LANG", "LD_LIBRARY_PATH", "LOGNAME", "PATH", "PYTHONPATH", "TZ", "USER", "VIRTUAL_ENV")
FIXED = {
    "PYTHONHASHSEED": "0",  # the same task finds the same content in every sandbox
    "PYTHONUNBUFFERED": "1",  # what was printed before a crash is seen
    "OMP_NUM_THREADS": "1",  # one core per episode: there are many
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
}


def clean_variables(variables: Mapping[str, str]) -> dict[str, str]:
    """Return the harmless ones of a supervisor's environment variables; credentials least of all. With these its fork server starts."""
    harmless = {k: v for k, v in variables.items() if k in _INHERITED or k.startswith("LC_")}
    return {**harmless, **FIXED}


def given_variables(variables: Mapping[str, str]) -> dict[str, str]:
    """Return what is meant for environment code: `MARLAAS_ENVIRONMENT_X` becomes `X`. This is how a job's secrets get in.

    Set only once a process is secluded: LD_PRELOAD or PYTHONPATH would else run tenants' code before.
    """
    return {k.removeprefix(ENVIRONMENT_PREFIX): v for k, v in variables.items() if k.startswith(ENVIRONMENT_PREFIX)}
