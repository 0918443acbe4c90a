"""The environments of a job: its own, and those of the suites of its evaluation."""

from collections.abc import Mapping, Sequence
from typing import Any

from marlaas.environment_types import ServiceFailed
from marlaas.envs.loading import Environment, load
from marlaas_api.errors import InvalidInput

Environments = Mapping[str, Environment]
"""By suite; the job's own environment has the empty name."""


def load_suites(
    suites: Mapping[str, Mapping[str, Any]], agents: Sequence[str]
) -> tuple[dict[str, Environment], tuple[str, ...]]:
    """Load the environments of suites; return also sentences, as `load`.

    Args:
        suites: `name` and `args` of the environment, by suite.
        agents: the job's agents.

    Raises:
        InvalidInput: as `load`; its text names the suite.
        ServiceFailed: as `load`.
        Other exceptions: of an environment's `__init__`.
    """
    made: dict[str, Environment] = {}
    notes: list[str] = []
    for suite, given in suites.items():
        try:
            made[suite], told = load(given["name"], given["args"], agents)
        except ServiceFailed:  # as it is: a sandbox loads the suite again later
            raise
        except InvalidInput as error:
            raise InvalidInput(f"suite {suite}: {error}") from error.__cause__
        notes += [f"suite {suite}: {sentence}" for sentence in told]
    return made, tuple(notes)
