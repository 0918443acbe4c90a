"""What the process of a role sets up: a home and a name, the same bits, and its libraries; and the init container that prepares the model."""

import asyncio
import gc
import getpass
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from tests.models.model_folders import write_model
from tests.tables import data, rows

from marlaas_api.bus import BusRefused
from marlaas_api.bus_nats.client import prepare_transport, transport
from marlaas_api.documents import pool_spec
from marlaas_api.kinds import ModelPoolSpec
from marlaas_api.messages import PoolDocument
from marlaas_worker.prepare import main
from marlaas_worker.process_setup import collect_once_ready, drop_read_only_caches, make_home

# Imports first: the interpreter may lie where that user may not read.
NAMELESS = data(__file__, "nameless")


def test_without_a_home_there_is_one_below_scratch_and_otherwise_nothing_is_touched(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    before = dict(os.environ)
    make_home(tmp_path / "scratch")
    assert dict(os.environ) == before
    assert not (tmp_path / "scratch").exists()
    monkeypatch.setenv("HOME", str(tmp_path / "gone"))
    monkeypatch.setenv("USER", "somebody")
    make_home(tmp_path / "scratch")
    assert Path.home() == tmp_path / "scratch" / "home"
    assert Path.home().is_dir()
    assert getpass.getuser() == os.environ.get("LOGNAME", "somebody")


def test_caches_that_cannot_be_written_are_the_libraries_default_ones(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path / "new" / "vllm"))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "file" / "triton"))
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    drop_read_only_caches()
    assert os.environ["VLLM_CACHE_ROOT"] == str(tmp_path / "new" / "vllm")
    assert {"TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR"}.isdisjoint(os.environ)


@pytest.mark.processes
@pytest.mark.skipif(os.getuid() != 0, reason="needs root to become a user that no password file knows")
def test_a_user_that_nobody_knows_can_use_torchs_compiler():
    with tempfile.TemporaryDirectory() as scratch:
        os.chown(scratch, 10001, 10001)
        env = {"PATH": os.environ["PATH"], "PYTHONPATH": ":".join(filter(None, sys.path)), "TMPDIR": scratch}
        command = [sys.executable, "-c", NAMELESS, scratch]
        done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    home, name, cache = done.stdout.split()
    assert (home, name) == (f"{scratch}/home", "marlaas")
    assert cache.startswith(scratch)


SCRIPT = data(__file__, "mkl_script")

PRODUCTS = data(__file__, "products")


def run(*arguments, **variables):
    """Run a script without the settings of MKL that the tests have; return the words that it prints."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MKL_")} | variables
    command = [sys.executable, "-c", *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.split()


@pytest.mark.processes
def test_a_role_asks_before_anything_that_computes_is_imported_and_what_the_user_has_set_stays():
    assert run(SCRIPT) == ["AUTO,STRICT", "FALSE"]
    assert run(SCRIPT, MKL_CBWR="AVX2") == ["AVX2", "FALSE"]


@pytest.mark.processes
def test_a_product_has_the_same_bits_wherever_its_matrices_lie_in_memory():
    """Shapes of an adapter of rank 8. Without being asked, MKL gives some of them several results on most processors."""
    assert run(PRODUCTS) == ["1", "1", "1"]


HEAVY = {"aiohttp", "numpy", "torch", "transformers", "vllm"}
FORK_SERVER = {"asyncio", "logging", "nats", "pydantic", "ssl"}


def forked_collects():
    if (child := os.fork()) == 0:
        os._exit(gc.isenabled())
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1


async def test_garbage_is_collected_once_the_role_is_ready_or_ends_and_before_that_in_the_processes_that_it_forks(
    monkeypatch,
):
    ready, frozen = asyncio.Event(), asyncio.Event()
    monkeypatch.setattr(gc, "freeze", frozen.set)
    async with collect_once_ready(ready.is_set, check_s=0.0):
        assert not gc.isenabled()
        assert forked_collects()
        ready.set()
        await frozen.wait()
        assert gc.isenabled()
    async with collect_once_ready(lambda: False):
        assert not gc.isenabled()
    assert gc.isenabled()


async def test_a_role_that_is_not_ready_for_long_collects_garbage_all_the_same(monkeypatch):
    enabled, enable = asyncio.Event(), gc.enable
    monkeypatch.setattr(gc, "enable", lambda: (enable(), enabled.set()))
    async with collect_once_ready(lambda: False, longest_s=0.0):
        await enabled.wait()
        assert gc.isenabled()


def imported(module):
    return set(run(f"import {module}, sys; print(*sys.modules)"))


def test_a_sandbox_and_its_fork_server_import_none_of_the_libraries_that_they_do_not_need():
    found = imported("marlaas_worker.__main__, marlaas_worker.sandbox.service")
    assert "nats" in found
    assert found & HEAVY == set()
    assert imported("marlaas_worker.sandbox.forkserver") & (HEAVY | FORK_SERVER) == set()


def test_a_websocket_url_gets_its_library_or_is_refused_with_its_name(monkeypatch):
    monkeypatch.setattr(transport, "aiohttp", None)
    prepare_transport("nats://127.0.0.1:4222")
    assert transport.aiohttp is None
    prepare_transport("wss://nats.example:443")
    assert transport.aiohttp is sys.modules["aiohttp"]
    monkeypatch.setitem(sys.modules, "aiohttp", None)
    with pytest.raises(BusRefused, match="needs aiohttp"):
        prepare_transport("ws://nats.example:80")


COMMIT = "c" * 40


class Pod:
    def __init__(self, folder, monkeypatch, capfd):
        self.folder, self._patch, self._capfd = folder, monkeypatch, capfd
        self.pool_file, self.out = folder / "pool.json", folder / "scratch" / "pool.json"
        self.arguments = ["--pool-file", str(self.pool_file), "--out", str(self.out)]
        self.set(HF_HUB_DISABLE_PROGRESS_BARS="1", HF_HOME=str(folder / "hf"))

    def set(self, **variables):
        for name, value in variables.items():
            self._patch.setenv(name, value)

    def give(self, **model):
        spec = pool_spec(ModelPoolSpec.model_validate({"model": model}))
        self.pool_file.write_text(PoolDocument(name="small", model_path="", spec=spec).model_dump_json(by_alias=True))

    def run(self):
        """Exit code and the last line, in this process."""
        code = main(self.arguments)
        return code, self._capfd.readouterr().err.strip().rpartition("\n")[2]

    def run_process(self):
        environment = os.environ | {"PYTHONPATH": ":".join(filter(None, sys.path))}
        command = [sys.executable, "-m", "marlaas_worker.prepare", *self.arguments]
        done = subprocess.run(command, env=environment, stderr=subprocess.PIPE, text=True, check=False, timeout=120)
        return done.returncode, done.stderr.strip().rpartition("\n")[2]

    @property
    def model_path(self):
        return PoolDocument.model_validate_json(self.out.read_text()).model_path


@pytest.fixture
def pod(tmp_path, monkeypatch, capfd):
    return Pod(tmp_path, monkeypatch, capfd)


def test_a_folder_of_the_machine_or_of_a_mounted_volume_is_looked_for_and_the_pool_is_otherwise_the_same(pod):
    folder = write_model(pod.folder / "model")
    pod.give(path=str(folder))
    for _ in range(2):
        assert pod.run() == (0, f"pool small: the model is in {folder}"), "once more changes nothing"
    before, after = (PoolDocument.model_validate_json(file.read_text()) for file in (pod.pool_file, pod.out))
    assert after == before.model_copy(update={"model_path": str(folder)})
    folder = write_model(pod.folder / "mount" / "models" / "a")
    pod.set(MARLAAS_MODEL_MOUNT=str(pod.folder / "mount"))
    pod.give(pvc={"claimName": "models", "path": "/models/a"})
    assert pod.run()[0] == 0
    assert pod.model_path == str(folder)


@pytest.mark.processes
def test_a_model_of_the_hub_is_looked_for_in_the_shared_cache(pod, monkeypatch):
    monkeypatch.delenv("HF_HOME")
    pod.set(MARLAAS_CACHE=str(pod.folder / "cache"), HF_HUB_OFFLINE="1")
    pod.give(hub={"id": "some/model", "revision": COMMIT})
    code, words = pod.run_process()
    assert (code, words.startswith(f"model some/model@{COMMIT} is not in the hub's cache")) == (2, True)
    fetched = write_model(pod.folder / "cache" / "huggingface" / "hub" / "models--some--model" / "snapshots" / COMMIT)
    assert pod.run_process()[0] == 0
    assert pod.model_path == str(fetched)


@pytest.mark.parametrize(("model", "words"), rows(__file__, "models"))
def test_what_only_a_person_can_mend_is_said_in_the_last_line(pod, model, words):
    if model:
        pod.give(**model)
    elif model == {}:
        pod.pool_file.write_text("{}")
    code, said = pod.run()
    assert code == 2
    assert said.startswith(words.format(pod.pool_file))
    assert not pod.out.exists()
