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
    """Return what environment code may see of a supervisor's environment variables: the harmless, and what is meant for it.

    `MARLAAS_ENVIRONMENT_X` becomes `X`: this is how a job's secrets get in. Nothing else does, credentials least of all.
    """
    meant = {k.removeprefix(ENVIRONMENT_PREFIX): v for k, v in variables.items() if k.startswith(ENVIRONMENT_PREFIX)}
    harmless = {k: v for k, v in variables.items() if k in _INHERITED or k.startswith("LC_")}
    return {**harmless, **FIXED, **meant}
