"""A runner as a process, around a real nats-server, with roles that follow a script."""

import json
import os
import subprocess
import sys
import uuid
from contextlib import contextmanager
from pathlib import Path

import psutil
from tests.models.model_folders import write_model

from marlaas_api.cpu_shares import FULL_SHARE

MARK = "MARLAAS_TEST_MARK"
POOL, _, JOB = Path(__file__).with_name("manifests.yaml").read_text(encoding="utf-8").partition("---\n")
JOB = f"---\n{JOB}"


class Run:
    def __init__(self, arguments, temporary):
        self.mark = str(uuid.uuid4())
        driver = Path(__file__).with_name("driver.py")
        env = {**os.environ, MARK: self.mark, "OMP_NUM_THREADS": "1", "TMPDIR": str(temporary)}
        command = [sys.executable, str(driver), *arguments]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, env=env)
        self.told: list[dict[str, object]] = []

    def lines(self):
        for line in self.process.stdout:
            self.told.append(json.loads(line))
            yield self.told[-1]

    def until(self, **wanted: object):
        for line in self.lines():
            if all(line.get(key) == value for key, value in wanted.items()):
                return line
        raise AssertionError(f"it ended without telling {wanted}: {self.told}")

    def told_of(self, **wanted: object):
        """Read on until an object has these values, unless one had them already: what two tellers tell comes in either order."""
        if not any(all(line.get(key) == value for key, value in wanted.items()) for line in self.told):
            self.until(**wanted)

    def end(self):
        for _ in self.lines():
            pass
        return self.process.wait()

    def processes(self):
        return [process for process in psutil.process_iter() if mark_of(process) == self.mark]

    def role(self, role, job="reverse"):
        """The process of a role; of several sandboxes the one of this job."""
        found = [process for process in self.processes() if role in process.cmdline()]
        (one,) = [process for process in found if role != "sandbox" or f"{job}.json" in " ".join(process.cmdline())]
        return one


def share_of(pid):
    """Return the niceness of a process's session; a full share if the kernel does not tell."""
    try:
        return int(Path(f"/proc/{pid}/autogroup").read_text().split()[-1])
    except (OSError, ValueError, IndexError):
        return FULL_SHARE


def mark_of(process):
    """Which run's it is; None when it is not alive any more."""
    try:
        return None if process.status() == psutil.STATUS_ZOMBIE else process.environ().get(MARK)
    except psutil.Error:
        return None


class Place:
    def __init__(self, folder):
        self.folder, self.out = folder, folder / "out"
        self.temporary = folder / "temporary"
        self.temporary.mkdir()
        write_model(folder / "model")
        self.runs: list[Run] = []
        self.write(reverse=3)
        self.script()

    def write(self, **jobs: int):
        text = POOL % (self.folder / "model") + "".join(JOB % item for item in jobs.items())
        (self.folder / "jobs.yaml").write_text(text)

    def script(self, **settings: object):
        (self.folder / "script.json").write_text(json.dumps(settings))

    def go(self):
        (self.folder / "go").touch()

    def start(self, *more: str):
        arguments = [str(self.folder / "script.json"), str(self.folder / "jobs.yaml"), str(self.out), *more]
        self.runs.append(Run(arguments, self.temporary))
        return self.runs[-1]

    def summary(self):
        return json.loads((self.out / "summary.json").read_text())["jobs"]

    def steps(self, job="reverse"):
        lines = (self.out / "team-a" / job / "steps.jsonl").read_text().splitlines()
        return [json.loads(line)["step"] for line in lines]

    def log(self, name):
        return (self.out / ".state" / "logs" / name).read_text()


@contextmanager
def placed(folder):
    """Whatever a test does, no process is left, nor anything in the folder for temporary files."""
    here = Place(folder)
    try:
        yield here
    finally:
        left = [process for run in here.runs for process in run.processes()]
        for process in left:
            process.kill()
        for run in here.runs:
            run.process.stdout.close()
            run.process.wait()
    assert left == []
    assert list(here.temporary.iterdir()) == []
