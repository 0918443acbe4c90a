"""Check environments in a separate process, because importing a user's module may print, crash, exit or hang.

`python -m marlaas.environment_check` reads [[name, args, agents], …] as JSON from standard input. It writes one JSON line
per environment as soon as the result is known: null, or the problem as text. Builtin environments are also created,
which checks the values of their arguments. A user's `__init__` is not called, because it may load a data set.
"""

import json
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from marlaas.envs import BUILTINS
from marlaas.envs.loading import resolve
from marlaas_api.errors import InvalidInput


def complaint(name: str, args: Mapping[str, Any], agents: Sequence[str]) -> str | None:
    """Return the problem with the environment of this name, these arguments and the job's agents; None if there is none."""
    try:
        code = resolve(name, args)
        code.check_agents(agents)
        if name in BUILTINS:
            code.create()
    except InvalidInput as error:
        return str(error)
    return None


def main() -> None:
    """Check the environments that standard input lists."""
    with os.fdopen(os.dup(1), "w") as answers:
        os.dup2(2, 1)  # standard output carries only the answers: what a module prints goes to standard error
        for name, args, agents in json.load(sys.stdin):
            answers.write(json.dumps(complaint(name, args, agents)) + "\n")
            answers.flush()


if __name__ == "__main__":
    main()
