"""The runner as a process, around a real nats-server, with roles that follow a script."""

import json
import os
import re
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from tensorboard.backend.event_processing.plugin_event_multiplexer import EventMultiplexer
from tests.models.model_folders import write_model

from marlaas_api.bus_users import BusKeys, OrchestratorUser, mint, server_config
from marlaas_api.nats_server import EmbeddedNats

SEED = re.compile(r"\bS[AOU][A-Z2-7]{50,}")
MARK = "MARLAAS_TEST_MARK"
POOL = """
apiVersion: marlaas.dev/v1alpha1
kind: ModelPool
metadata: {name: tiny}
spec: {model: {path: %s}}
"""
JOB = """---
apiVersion: marlaas.dev/v1alpha1
kind: RLJob
metadata: {name: %s, namespace: team-a}
spec:
  poolRef: {name: tiny}
  environment: {name: reverse}
  training: {steps: %d}
"""


class Run:
    """A runner process and what it has told so far."""

    def __init__(self, arguments: list[str], temporary: Path) -> None:
        self.mark = str(uuid.uuid4())
        driver = Path(__file__).with_name("driver.py")
        self.process = subprocess.Popen(
            [sys.executable, str(driver), *arguments],
            stdout=subprocess.PIPE,
            env={**os.environ, MARK: self.mark, "OMP_NUM_THREADS": "1", "TMPDIR": str(temporary)},
        )
        self.told: list[dict[str, object]] = []

    def lines(self) -> Iterator[dict[str, object]]:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.told.append(json.loads(line))
            yield self.told[-1]

    def until(self, **wanted: object) -> dict[str, object]:
        """Read on until an object has these values."""
        for line in self.lines():
            if all(line.get(key) == value for key, value in wanted.items()):
                return line
        raise AssertionError(f"it ended without telling {wanted}: {self.told}")

    def end(self) -> int:
        """Read to the end and return the exit code."""
        for _ in self.lines():
            pass
        return self.process.wait()

    def processes(self) -> list[psutil.Process]:
        """Everything alive that this runner or its children started."""
        return [process for process in psutil.process_iter() if _mark(process) == self.mark]

    def named(self, word: str) -> psutil.Process:
        """The one process whose command line has this word."""
        (found,) = [process for process in self.processes() if word in process.cmdline()]
        return found


def _mark(process: psutil.Process) -> str | None:
    try:
        return None if process.status() == psutil.STATUS_ZOMBIE else process.environ().get(MARK)
    except psutil.Error:
        return None


class Place:
    """A manifest, a script and an output folder."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.out = folder, folder / "out"
        self.temporary = folder / "temporary"
        self.temporary.mkdir()
        write_model(folder / "model")
        self.runs: list[Run] = []
        self.write(reverse=3)
        self.script()

    def write(self, **jobs: int) -> None:
        text = POOL % (self.folder / "model") + "".join(JOB % item for item in jobs.items())
        (self.folder / "jobs.yaml").write_text(text)

    def script(self, **settings: object) -> None:
        (self.folder / "script.json").write_text(json.dumps(settings))

    def go(self) -> None:
        (self.folder / "go").touch()

    def start(self, *more: str) -> Run:
        arguments = [str(self.folder / "script.json"), str(self.folder / "jobs.yaml"), str(self.out), *more]
        self.runs.append(Run(arguments, self.temporary))
        return self.runs[-1]

    def summary(self) -> dict[str, dict[str, object]]:
        return json.loads((self.out / "summary.json").read_text())["jobs"]

    def steps(self, job: str = "reverse") -> list[int]:
        lines = (self.out / "team-a" / job / "steps.jsonl").read_text().splitlines()
        return [json.loads(line)["step"] for line in lines]

    def log(self, name: str) -> str:
        return (self.out / ".state" / "logs" / name).read_text()


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    """Whatever a test does, no process is left, nor anything in the folder for temporary files."""
    here = Place(tmp_path)
    yield here
    left = [process for run in here.runs for process in run.processes()]
    for process in left:
        process.kill()
    for run in here.runs:
        run.process.stdout.close()
        run.process.wait()
    assert left == []
    assert list(here.temporary.iterdir()) == []


def test_a_run_ends_with_everything_a_person_wants_of_its_jobs(place: Place) -> None:
    place.write(reverse=3, spell=2)
    (place.folder / "games.py").touch()
    run = place.start()
    assert run.end() == 0
    assert run.processes() == []
    assert place.summary()["team-a/reverse"] == {
        "phase": "Succeeded",
        "evalBefore": 0.25,
        "evalAfter": 0.75,
        "steps": 3,
        "policyVersion": 3,
        "wallSeconds": 60.0,
        "faults": {"env": 1},
    }
    assert (place.steps(), place.steps("spell")) == ([0, 1, 2], [0, 1])
    job = place.out / "team-a" / "spell"
    assert (job / "adapter" / "adapter_config.json").read_text() == '{"r": 8}'
    assert (job / "curve.png").read_bytes().startswith(b"\x89PNG")
    assert [json.loads(line)["version"] for line in (job / "evals.jsonl").read_text().splitlines()] == [0, 2]
    assert f"playing team-a/spell of {place.folder / 'games.py'}" in (job / "logs" / "sandbox-0.log").read_text()
    assert "trainer starts" in (job / "logs" / "trainer-0.tiny.log").read_text()


def test_what_is_told_as_json_is_one_object_per_change_and_a_summary_at_the_end(place: Place) -> None:
    run = place.start()
    assert run.end() == 0
    levels = [line for line in run.told if line["type"] == "progress"]
    assert len(levels) == len({json.dumps(line, sort_keys=True) for line in levels})
    assert (levels[-1]["phase"], levels[-1]["step"], levels[-1]["steps"]) == ("Succeeded", 3, 3)
    assert run.told[-1]["type"] == "summary"
    assert run.told[-1]["jobs"] == place.summary()


def test_a_finished_run_prints_its_summary_again_and_starts_nothing(place: Place) -> None:
    assert place.start().end() == 0
    again = place.start()
    assert again.end() == 0
    assert [line["type"] for line in again.told] == ["note", "summary"]
    assert again.told[-1]["jobs"] == place.summary()


@pytest.mark.parametrize("role", ["orchestrator", "rollout", "trainer", "sandbox"])
def test_a_role_that_is_killed_is_started_again_and_nothing_is_counted_twice(place: Place, role: str) -> None:
    place.script(pause_at=2)
    run = place.start()
    run.until(type="progress", step=2)
    run.until(type="status", message="training")
    run.named(role).kill()
    told = run.until(type="note")
    assert f"{role if role == 'orchestrator' else role + '-0'}" in told["message"]
    assert "killed by SIGKILL; it starts again" in told["message"]
    place.go()
    assert run.end() == 0
    assert place.steps() == [0, 1, 2]


def test_the_message_server_is_started_again_where_it_was(place: Place) -> None:
    place.script(pause_at=2)
    run = place.start()
    run.until(type="progress", step=2)
    (server,) = [process for process in run.processes() if process.name() == "nats-server"]
    server.kill()
    place.go()
    assert run.end() == 0
    assert place.steps() == [0, 1, 2]


def test_a_role_that_always_dies_is_given_up_with_its_own_words(place: Place) -> None:
    place.script(rollout={"how": "raise", "text": "No common block size for 16", "times": 99}, pause_at=1)
    run = place.start()
    assert run.end() == 1
    entry = place.summary()["team-a/reverse"]
    assert (entry["phase"], entry["reason"]) == ("Failed", "RoleFailed")
    assert (
        "rollout-0 (tiny) died: ValueError: No common block size for 16; given up after it died 3 times"
        in entry["message"]
    )
    assert "Traceback" in place.log("rollout-0.tiny.log")


def test_what_only_a_person_can_mend_is_given_up_at_once(place: Place) -> None:
    place.script(trainer={"how": "invalid", "text": "adapter rank 64 is above 16", "times": 99})
    run = place.start()
    assert run.end() == 1
    assert "adapter rank 64 is above 16; given up" in place.summary()["team-a/reverse"]["message"]
    assert place.log("trainer-0.tiny.log").count("=== start") == 1


def test_a_job_whose_sandbox_cannot_run_fails_while_the_others_go_on(place: Place) -> None:
    place.write(reverse=3, spell=2)
    place.script(sandbox={"how": "invalid", "text": "no such environment", "times": 1}, pause_at=1)
    run = place.start()
    run.until(type="note")
    place.go()
    assert run.end() == 1
    phases = {name: entry["phase"] for name, entry in place.summary().items()}
    assert sorted(phases.values()) == ["Failed", "Succeeded"]


def test_a_job_that_the_runner_gave_up_goes_on_when_the_reason_is_gone(place: Place) -> None:
    place.script(trainer={"how": "invalid", "text": "no", "times": 1})
    assert place.start().end() == 1
    assert place.start().end() == 0
    assert place.summary()["team-a/reverse"]["phase"] == "Succeeded"


def test_ctrl_c_drains_and_the_same_command_goes_on(place: Place) -> None:
    place.script(pause_at=2)
    run = place.start()
    run.until(type="progress", step=2)
    run.process.send_signal(signal.SIGINT)
    assert run.end() == 130
    assert run.processes() == []
    assert "trainer has drained" in place.log("trainer-0.tiny.log")
    assert any("run the same command again to go on: marlaas run" in str(line.get("message")) for line in run.told)
    assert place.summary()["team-a/reverse"]["phase"] == "Running"
    place.go()
    assert place.start().end() == 0
    assert place.steps() == [0, 1, 2]


def test_ctrl_c_twice_ends_everything_at_once(place: Place) -> None:
    place.script(pause_at=1, stubborn=True)
    run = place.start()
    run.until(type="progress", step=1)
    run.process.send_signal(signal.SIGINT)
    run.until(type="note")
    run.process.send_signal(signal.SIGINT)
    assert run.end() == 130
    assert run.processes() == []


def test_nothing_outlives_a_runner_that_is_killed_and_the_same_command_goes_on(place: Place) -> None:
    place.script(pause_at=1)
    run = place.start()
    run.until(type="progress", step=1)
    everything = [process for process in run.processes() if process.pid != run.process.pid]
    assert len(everything) >= 8
    run.process.kill()
    run.process.wait()
    _, alive = psutil.wait_procs([process for process in everything if _mark(process)], timeout=60)
    assert [process for process in alive if _mark(process)] == []
    place.go()
    assert place.start().end() == 0
    assert place.steps() == [0, 1, 2]


def test_a_tracker_hears_of_every_step_once_however_often_the_run_is_stopped(place: Place) -> None:
    manifest = place.folder / "jobs.yaml"
    manifest.write_text(manifest.read_text().replace("training:", "export: {trackers: [tensorboard]}\n  training:"))
    place.script(pause_at=2)
    run = place.start()
    run.until(type="progress", step=2)
    run.process.send_signal(signal.SIGINT)
    assert run.end() == 130
    place.go()
    again = place.start()
    assert again.end() == 0
    events = EventMultiplexer().AddRunsFromDirectory(str(place.out / "team-a" / "reverse" / "tensorboard"))
    events.Reload()
    assert sorted(event.step for event in events.Tensors(".", "reward/train")) == [1, 2, 3]
    assert sorted(event.step for event in events.Tensors(".", "reward/held_out")) == [0, 3]
    assert any("tensorboard --logdir" in str(line.get("message")) for line in again.told)


def test_more_steps_take_a_finished_job_further(place: Place) -> None:
    assert place.start().end() == 0
    place.write(reverse=5)
    assert place.start().end() == 0
    assert place.steps() == [0, 1, 2, 3, 4]
    assert place.summary()["team-a/reverse"]["steps"] == 5


def test_a_manifest_that_changed_too_much_is_refused_before_anything_starts(place: Place) -> None:
    assert place.start().end() == 0
    place.write(reverse=2)
    run = place.start()
    assert run.end() == 2
    assert [line["type"] for line in run.told] == ["error"]
    assert "spec.training.steps was 3 and is now 2" in str(run.told[0]["message"])


def test_a_second_run_into_the_same_folder_is_refused(place: Place) -> None:
    place.script(pause_at=1)
    first = place.start()
    first.until(type="progress", step=1)
    second = place.start()
    assert second.end() == 2
    assert f"process {first.process.pid}" in str(second.told[-1]["message"])
    place.go()
    assert first.end() == 0


def test_every_role_connects_as_itself_and_no_secret_lies_where_others_look(place: Place) -> None:
    place.script(pause_at=1)
    run = place.start()
    run.until(type="progress", step=1)
    while (
        len(list(place.folder.glob("*.connected"))) < 4
    ):  # the pool's workers take longer, and the script waits for nobody
        time.sleep(0.05)
    said = [" ".join([*process.cmdline(), *process.environ().values()]) for process in run.processes()]
    files = [path for path in place.folder.rglob("*") if path.is_file()]
    said += [path.read_bytes().decode(errors="replace") for path in files]
    place.go()
    assert run.end() == 0
    users = {
        path.stem.rpartition(".")[0] if path.stem.startswith("sandbox") else path.stem
        for path in place.folder.glob("*.connected")
    }
    assert users == {"orchestrator", "rollout.tiny", "trainer.tiny", "sandbox.team-a.reverse"}
    assert not [text for text in said if SEED.search(text)]


async def test_a_server_with_users_of_its_own_takes_the_persons_credentials(place: Place, tmp_path: Path) -> None:
    keys = BusKeys.make()
    async with EmbeddedNats(tmp_path / "nats", extra_config=server_config(keys)) as server:
        refused = place.start(server.url)
        assert refused.end() == 2
        assert "rejects marlaas run" in str(refused.told[-1]["message"])
        creds = tmp_path / "runner.creds"
        creds.write_text(mint(keys, OrchestratorUser(), time.time()))
        assert place.start(server.url, str(creds)).end() == 0


async def test_a_server_that_is_there_already_is_used_and_left_running(place: Place, tmp_path: Path) -> None:
    async with EmbeddedNats(tmp_path / "nats") as server:
        run = place.start(server.url)
        assert run.end() == 0
        assert server.pid is not None
        place.out = tmp_path / "other"
        other = place.start(server.url)
        assert other.end() == 2
        assert "already has a job team-a/reverse of another run" in str(other.told[-1]["message"])
