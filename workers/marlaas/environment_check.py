"""Check environments in a separate process, because importing a user's module may print, crash, exit or hang.

`python -m marlaas.environment_check` reads [[name, args, agents, demonstrates], …] as JSON from standard input. It writes one JSON line
per environment as soon as the result is known (`Checked`). Builtin environments are also created, which checks the
values of their arguments and the rows of a data set. A user's `__init__` is not called, because it may load a data set.
"""

import json
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from marlaas.environment import Split, Task
from marlaas.envs import BUILTINS
from marlaas.envs.demonstrations import demonstration_of
from marlaas.envs.loading import resolve
from marlaas_api.errors import InvalidInput


class Checked(NamedTuple):
    """Result for one environment.

    problems: what must be changed first; empty: nothing. loc: the place of the problems below `args`, if it is known.
    notes: what a user should know before it is played.
    """

    problems: Sequence[str]
    loc: Sequence[str | int] = ()
    notes: Sequence[str] = ()


def checked(name: str, args: Mapping[str, Any], agents: Sequence[str], demonstrates: bool = False) -> Checked:
    """Check the environment of this name, these arguments and the job's agents. demonstrates: the job trains its demonstrations."""
    notes: Sequence[str] = ()
    try:
        code = resolve(name, args)
        code.check_agents(agents)
        if demonstrates:
            code.check_demonstrates()
        if name in BUILTINS:
            made = code.create()
            notes = made.notes
            if demonstrates:
                demonstration_of(made, Task(Split.TRAIN, 0, 0), agents)
    except InvalidInput as error:
        return Checked(getattr(error, "problems", None) or [str(error)], getattr(error, "loc", ()))
    return Checked((), notes=notes)


def main() -> None:
    """Check the environments that standard input lists."""
    with os.fdopen(os.dup(1), "w") as answers:
        os.dup2(2, 1)  # standard output carries only the answers: what a module prints goes to standard error
        for name, args, agents, demonstrates in json.load(sys.stdin):
            answers.write(json.dumps(checked(name, args, agents, demonstrates)) + "\n")
            answers.flush()


if __name__ == "__main__":
    main()
