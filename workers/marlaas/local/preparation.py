"""Prepares the base model on this machine's disk before anything is started, in a separate process.

Preparing a model needs torch, which the runner should neither import nor wait for. The process can be killed at any
moment: an unfinished model is not in the cache. It reports its progress on stdout, one JSON object per line.
"""

import asyncio
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

from marlaas.local.processes import Watchdog
from marlaas.local.watchdog import kill_session
from marlaas.models import prepared, resolve
from marlaas_api.errors import InvalidInput, MarlaasError
from marlaas_api.kinds import ModelSpec
from marlaas_api.last_words import last_words

Waiting = Callable[[str, float | None], None]
"""Called with a text about the current work and its finished share, 0 to 1 (None: unknown)."""


async def prepare(model: ModelSpec, waiting: Waiting, watchdog: Watchdog) -> Path:
    """Return the folder of a base model, once it is prepared.

    Raises:
        InvalidInput: it cannot be prepared; the text gives the reason and what to do.
    """
    there = _there(model)
    if there is not None:
        return there
    name = describe(model)
    waiting(f"looking for model {name}", None)
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", "-m", "marlaas.local.preparation", model.model_dump_json(by_alias=True)),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        start_new_session=True,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    watchdog.add(process.pid)
    words = asyncio.ensure_future(process.stderr.read())
    try:
        async for line in process.stdout:
            told = _told(line)
            if "path" in told:
                return Path(str(told["path"]))
            if "error" in told:
                raise InvalidInput(f"model {name}: {told['error']}")
            if "share" in told:
                waiting(f"preparing model {name}", float(str(told["share"])))
        raise InvalidInput(f"model {name} could not be prepared: {last_words((await words).decode(errors='replace'))}")
    finally:
        kill_session(process.pid)
        await asyncio.gather(process.wait(), words)
        watchdog.remove(process.pid)


def _there(model: ModelSpec) -> Path | None:
    """Return the folder if the model needs no preparation; else None."""
    if model.builtin is not None:
        return prepared(model.builtin)
    return resolve(model) if model.path is not None else None


def describe(model: ModelSpec) -> str:
    """Return the base model's name for users."""
    if model.hub is not None:
        return f"{model.hub.id}@{model.hub.revision}"
    return model.builtin or model.path or "of a PersistentVolumeClaim"


def _told(line: bytes) -> dict[str, object]:
    """Parse a line of the process; empty if it is not a JSON object, because libraries print as well."""
    try:
        told = json.loads(line)
    except ValueError:
        return {}
    return told if isinstance(told, dict) else {}


def main(model: str) -> None:
    """Prepare the model in this process and report on stdout."""
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)

    def say(**told: object) -> None:
        print(json.dumps(told), file=out)

    try:
        path = resolve(ModelSpec.model_validate_json(model), lambda share: say(share=share))
    except MarlaasError as error:
        say(error=str(error))
    else:
        say(path=str(path))


if __name__ == "__main__":
    main(sys.argv[1])
