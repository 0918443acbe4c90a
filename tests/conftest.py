"""What holds for all tests: how they compute, where their temporary files go, and which of them stay in one process.

Tests compute as the roles do; that is asked for here because MKL reads its settings once, whichever test comes first.
"""

import gc
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest
from xdist.scheduler import LoadScopeScheduling

from marlaas_worker.process_setup import ask_for_the_same_bits
from tests import api_server, folder_times, guard

ask_for_the_same_bits()
if (
    signal.getsignal(signal.SIGINT) is signal.SIG_IGN
):  # as below `nohup … &`: runs would inherit it, and Ctrl-C must stop them
    signal.signal(signal.SIGINT, signal.default_int_handler)
# The same examples in every run, whatever the machine's speed; `make explore` draws others.
hypothesis.settings.register_profile("same", deadline=None, derandomize=True, database=None, print_blob=True)
hypothesis.settings.register_profile("explore", deadline=None, database=None, print_blob=True)
hypothesis.settings.load_profile(os.environ.get("MARLAAS_HYPOTHESIS", "same"))

TESTS = Path(__file__).parent
LONG = (
    *(*api_server.FOLDERS, "loop", "rollout", "trainer", "local", "environment", "orchestrator", "api", "sandbox"),
    *("cli", "docs", "worker", "bench", "models", "tools", "exporter"),
)
"""Folders that take long, the longest first: begun first, they do not keep one process waiting for the other at the end."""


def pytest_configure(config: pytest.Config) -> None:
    """Report the time of each folder; run what fails by chance once more."""
    folder_times.register(config)
    guard.register(config)
    config.pluginmanager.register(api_server, "api-server")


class _ByFolder(LoadScopeScheduling):
    """One process has all tests of a folder, and one has all of the API server: what they share is dear."""

    def _split_scope(self, nodeid: str) -> str:
        folder = nodeid.split("::")[0].rpartition("/")[0]
        return "api server" if folder.removeprefix("tests/") in api_server.FOLDERS else folder


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> LoadScopeScheduling:
    """With several processes (`-n 2`)."""
    return _ByFolder(config, log)


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Iterator[None]:
    """Collect without the garbage collector, and keep the collected tests out of its later passes: collecting takes a third less time."""
    gc.disable()
    result = yield
    gc.freeze()
    gc.enable()
    return result


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The long folders first."""
    rank = {folder: at for at, folder in enumerate(LONG)}
    items.sort(key=lambda item: rank.get(item.path.parent.relative_to(TESTS).as_posix(), len(rank)))


@pytest.fixture(autouse=True, scope="session")
def _temporary_files(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Processes that tests kill cannot remove theirs: they go when the tests end. `tmp_path` stays as it was."""
    tmp_path_factory.getbasetemp()
    folder = tempfile.mkdtemp(prefix="marlaas-tests-")
    Path(folder).chmod(0o711)  # some processes of tests are another user's
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", folder)
        patch.setattr(tempfile, "tempdir", None)
        yield
    shutil.rmtree(folder, ignore_errors=True)
