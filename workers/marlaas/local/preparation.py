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
from marlaas_api.messages.pool_spec import ModelSource

Waiting = Callable[[str, float | None], None]
"""Called with a text about the current work and its finished share, 0 to 1 (None: unknown)."""


async def prepare(model: ModelSpec, waiting: Waiting, watchdog: Watchdog) -> Path:
    """Return the folder of a base model, once it is prepared.

    Raises:
        InvalidInput: it cannot be prepared; the text gives the reason and what to do.
    """
    folder = _ready_folder(model)
    if folder is not None:
        return folder
    name = describe(model)
    waiting(f"resolving model {name}", None)
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
    errors = asyncio.ensure_future(process.stderr.read())
    try:
        async for line in process.stdout:
            message = _parsed(line)
            if "path" in message:
                return Path(str(message["path"]))
            if "error" in message:
                raise InvalidInput(f"model {name}: {message['error']}")
            if "share" in message:
                waiting(f"preparing model {name}", float(str(message["share"])))
        raise InvalidInput(f"model {name} could not be prepared: {last_words((await errors).decode(errors='replace'))}")
    finally:
        kill_session(process.pid)
        await asyncio.gather(process.wait(), errors)
        watchdog.remove(process.pid)


def is_unseen(model: ModelSpec) -> bool:
    """Return whether a model cannot be inspected before it is fetched or built."""
    return model.hub is not None or (model.builtin is not None and prepared(model.builtin) is None)


def _ready_folder(model: ModelSpec) -> Path | None:
    """Return the folder if the model needs no preparation; else None."""
    if model.builtin is not None:
        return prepared(model.builtin)
    return resolve(model) if model.path is not None else None


def describe(model: ModelSpec | ModelSource) -> str:
    """Return the base model's name for users."""
    if model.hub is not None:
        return f"{model.hub.id}@{model.hub.revision}"
    return model.builtin or model.path or "of a PersistentVolumeClaim"


def _parsed(line: bytes) -> dict[str, object]:
    """Parse a line of the process; empty if it is not a JSON object, because libraries print as well."""
    try:
        message = json.loads(line)
    except ValueError:
        return {}
    return message if isinstance(message, dict) else {}


def main(model: str) -> None:
    """Prepare the model in this process and report on stdout."""
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)

    def send(**message: object) -> None:
        print(json.dumps(message), file=out)

    try:
        path = resolve(ModelSpec.model_validate_json(model), lambda share: send(share=share))
    except MarlaasError as error:
        send(error=str(error))
    else:
        send(path=str(path))


if __name__ == "__main__":
    main(sys.argv[1])
