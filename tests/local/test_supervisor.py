"""The runner closes credentials of jobs whose processes have ended."""

import asyncio
import sys
from contextlib import closing
from pathlib import Path
from typing import cast

from tests.harness import job_document

from marlaas.local.credentials import LocalIssuer
from marlaas.local.folder import hold
from marlaas.local.plan import ProcessSpec
from marlaas.local.processes import Launcher, Watchdog
from marlaas.local.supervisor import Supervisor
from marlaas_api.bus_users import BusKeys

FIRST, SECOND = job_document("first"), job_document("second")
WAIT = (sys.executable, "-c", "import time; time.sleep(600)")


class _NoProcess:
    stdin = None


def open_credentials() -> int:
    """Count this process's open files with credentials."""
    files = [file.readlink() for file in Path("/proc/self/fd").iterdir() if file.is_symlink()]
    return sum("marlaas-credentials" in str(file) for file in files)


async def test_credentials_of_a_job_are_closed_once_all_its_sandboxes_have_ended(tmp_path: Path) -> None:
    first, again, second = (
        ProcessSpec("sandbox", name, job=job.ref.key)
        for name, job in (("sandbox-0", FIRST), ("sandbox-1", FIRST), ("sandbox-0", SECOND))
    )
    guard = Watchdog(cast("asyncio.subprocess.Process", _NoProcess()), tmp_path)
    jobs = {job.ref.key: job for job in (FIRST, SECOND)}
    with hold(tmp_path / "out") as folder, closing(LocalIssuer(BusKeys.make())) as issuer:
        launcher = Launcher(folder, "nats://none", issuer, guard, {}, jobs, command=WAIT)
        async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
            supervisor = Supervisor(launcher, tasks)
            kept = []
            for wanted in ([first, again, second], [again, second], [second], []):
                supervisor.changed.clear()
                await supervisor.reconcile(wanted, ())
                if len(wanted) < 3:
                    await supervisor.changed.wait()
                    await supervisor.reconcile(wanted, ())
                kept.append(open_credentials())
    assert kept == [2, 2, 1, 0]
