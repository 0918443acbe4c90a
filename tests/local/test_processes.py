"""How roles are started, and when their credentials are closed."""

import asyncio
import sys
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
from tests.harness import job_document

from marlaas.local.credentials import CredentialSource, LocalIssuer, OneForAll
from marlaas.local.folder import OutFolder, hold
from marlaas.local.plan import MAX_NEVER_READY, MAX_START_S, ProcessSpec
from marlaas.local.processes import Launcher, Watchdog, own_variables
from marlaas.local.sandbox_parent import ParentLost, SandboxParent
from marlaas.local.supervisor import Supervisor
from marlaas_api.bus_users import BusKeys

pytestmark = pytest.mark.processes

FIRST, SECOND, THIRD, FOURTH = (job_document(name) for name in ("first", "second", "third", "fourth"))
WAIT = (sys.executable, "-c", "import time; time.sleep(600)")


class NoProcess:
    """A watchdog's process that hears nothing."""

    stdin = None


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[OutFolder]:
    with hold(tmp_path / "out") as held:
        yield held


def launcher_of(
    folder: OutFolder,
    *command: str,
    credentials: CredentialSource | None = None,
    modules: dict[str, Path] | None = None,
) -> Launcher:
    """A launcher of two jobs' roles."""
    guard = Watchdog(cast("asyncio.subprocess.Process", NoProcess()), folder.root)
    jobs = {job.ref.key: job for job in (FIRST, SECOND)}
    return Launcher(folder, "nats://none", credentials or OneForAll(None), guard, {}, jobs, modules or {}, command)


def sandbox(job: Any, number: int = 0) -> ProcessSpec:
    return ProcessSpec("sandbox", f"sandbox-{number}", job=job.ref.key)


OWN = {"environment": {"name": "game:play"}}


def test_each_sandbox_is_told_the_folder_of_its_own_jobs_manifest(folder: OutFolder) -> None:
    first, second = (job_document(name, spec=OWN) for name in ("first", "added"))
    launcher = launcher_of(folder, modules={first.ref.key: Path("/a")})
    launcher.add(first, Path("/of a change of it"))
    launcher.add(second, Path("/b"))
    launcher.add(THIRD, Path("/of a builtin environment"))
    told = {job.ref.name: launcher._modules(sandbox(job)) for job in (first, second, THIRD)}
    assert told == {"first": ["--modules", "/a"], "added": ["--modules", "/b"], "third": []}
    launcher.add(job_document("first", uid="of the next job of this name", spec=OWN), Path("/c"))
    assert launcher._modules(sandbox(first)) == ["--modules", "/c"]


def test_variables_of_the_shell_for_other_programs_do_not_reach_the_roles() -> None:
    dropped = (
        "PYTHONWARNINGS PYTHONOPTIMIZE PYTHONSTARTUP VLLM_PORT VLLM_DP_RANK MASTER_ADDR RANK LOCAL_RANK WORLD_SIZE"
    )
    kept = (
        "PATH PYTHONPATH PYTHONDONTWRITEBYTECODE VLLM_CACHE_ROOT HF_HOME CUDA_VISIBLE_DEVICES MARLAAS_ENVIRONMENT_RANK"
    )
    assert list(own_variables(dict.fromkeys(f"{dropped} {kept}".split(), "x"))) == kept.split()


class LostParent:
    """A common parent that has exited."""

    async def fork(self, *_: object) -> None:
        raise ParentLost("it has exited")


async def test_a_sandbox_starts_as_a_process_of_its_own_once_the_parent_is_lost(folder: OutFolder) -> None:
    launcher = launcher_of(folder, sys.executable, "-c", "import sys; print(sys.argv[1])")
    async with launcher.with_parent() as same:
        assert same is launcher  # a role command of a test has no common parent
    process = await replace(launcher, parent=cast("SandboxParent", LostParent())).start(sandbox(FIRST))
    assert await process.wait() == 0
    lines = launcher.log(sandbox(FIRST)).read_text().splitlines()
    assert lines[1:] == ["a process of its own, not a fork of the sandboxes' common parent: it has exited", "sandbox"]


def open_credentials() -> int:
    """Count this process's open files with credentials."""
    files = [file.readlink() for file in Path("/proc/self/fd").iterdir() if file.is_symlink()]
    return sum("marlaas-credentials" in str(file) for file in files)


async def test_credentials_of_a_job_are_closed_once_all_its_sandboxes_have_ended(folder: OutFolder) -> None:
    first, again, second = sandbox(FIRST), sandbox(FIRST, 1), sandbox(SECOND)
    with closing(LocalIssuer(BusKeys.make())) as issuer:
        async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
            supervisor = Supervisor(launcher_of(folder, *WAIT, credentials=issuer), tasks)
            kept = []
            for wanted in ([first, again, second], [again, second], [second], []):
                supervisor.changed.clear()
                await supervisor.reconcile(wanted, ())
                if len(wanted) < 3:
                    await supervisor.changed.wait()
                    await supervisor.reconcile(wanted, ())
                kept.append(open_credentials())
    assert kept == [2, 2, 1, 0]


async def test_a_worker_that_does_not_become_ready_is_ended_and_given_up_with_the_limit(folder: OutFolder) -> None:
    engine, now = ProcessSpec("rollout", "rollout-0", pool="tiny"), [0.0]
    async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
        supervisor = Supervisor(launcher_of(folder, *WAIT), tasks, lambda: now[0])
        for _ in range(MAX_NEVER_READY):
            assert supervisor.given_up() == ()
            supervisor.changed.clear()
            await supervisor.reconcile([engine], ())
            now[0] += MAX_START_S
            await supervisor.reconcile([engine], ())
            await supervisor.changed.wait()
            now[0] += MAX_START_S
        ((_, why),) = supervisor.given_up()
    assert "rollout-0 (tiny) exited: killed, because it was not ready after 30 m 00 s" in why
