"""`eager.py run …`: `marlaas run` with an orchestrator that preempts jobs after one second instead of a minute.

The orchestrator also writes each turn and episode that it purges into the folder `MARLAAS_TEST_PURGED`, before the purge.
The runner starts its roles with this file too: `eager.py role ROLE …`.
"""

import base64
import json
import os
import sys
import uuid
from pathlib import Path

PURGED = "MARLAAS_TEST_PURGED"
MIN_RUN_S = 1.0


def main() -> int | None:
    if sys.argv[1] == "role":
        return role(sys.argv[2:])
    from marlaas.local import processes

    processes.ROLE_COMMAND = (sys.executable, "-P", __file__, "role")  # before `runner` imports it
    from marlaas.cli.app import main as command

    return command()


def role(arguments: list[str]) -> int:
    from marlaas_worker.__main__ import main as serve

    if arguments[0] == "orchestrator":
        from marlaas_worker.orchestrator import preemption

        preemption.MIN_RUN_S = MIN_RUN_S
        keep_what_is_purged(Path(os.environ[PURGED]))
    return serve(arguments)


def keep_what_is_purged(folder: Path) -> None:
    """Write messages of TURNS and EPISODES into files of their own. A kill between write and purge doubles some."""
    from marlaas.local.folder import write
    from marlaas_api.bus_nats import NatsBus

    purge = NatsBus.purge

    async def keep_and_purge(bus: NatsBus, stream: str, subject: str, up_to: int | None = None) -> None:
        if stream in ("TURNS", "EPISODES"):
            stored = [one for one in await bus.replay(stream, subject) if up_to is None or one.sequence < up_to]
            lines = [[stream, one.sequence, one.subject, base64.b64encode(one.data).decode()] for one in stored]
            write(folder / f"{uuid.uuid4()}.json", json.dumps(lines).encode())
        await purge(bus, stream, subject, up_to)

    NatsBus.purge = keep_and_purge  # type: ignore[method-assign]


if __name__ == "__main__":
    sys.exit(main())
