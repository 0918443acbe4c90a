"""Checks environments in a process of its own: importing a user's module may print, crash, exit or hang.

`python -m marlaas.environment_check` reads [[name, args], …] as JSON from standard input and writes one JSON line for each as soon as it is
known: null, or what is wrong. Builtins are also made, which checks their arguments' values; a user's own `__init__` is not called,
since it may load a data set.
"""

import json
import os
import sys
from collections.abc import Mapping
from typing import Any

from marlaas.envs import BUILTINS
from marlaas.envs.loading import resolve
from marlaas_api.errors import InvalidInput


def complaint(name: str, args: Mapping[str, Any]) -> str | None:
    """What is wrong with an environment of this name and these arguments."""
    try:
        code = resolve(name, args)
        if name in BUILTINS:
            code.create()
    except InvalidInput as error:
        return str(error)
    return None


def main() -> None:
    """Check what standard input names."""
    with os.fdopen(os.dup(1), "w") as answers:
        os.dup2(2, 1)  # what a module prints is not an answer
        for name, args in json.load(sys.stdin):
            answers.write(json.dumps(complaint(name, args)) + "\n")
            answers.flush()


if __name__ == "__main__":
    main()
