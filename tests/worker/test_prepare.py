"""The init container: each kind of model, twice, and every failure's last words."""

import os
import subprocess
import sys

import pytest
from tests.models.model_folders import write_model
from tests.tables import rows

from marlaas_api.documents import pool_spec
from marlaas_api.kinds import ModelPoolSpec
from marlaas_api.messages import PoolDocument
from marlaas_worker.prepare import main

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
    """In a process of its own: the hub's library reads its settings once."""
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
