"""The same command once more: after a stop, a kill, an end, or while the first one runs; and a run's message server."""

import contextlib
import os
import re
import signal
import time
from pathlib import Path

import psutil
from tensorboard.backend.event_processing.plugin_event_multiplexer import EventMultiplexer
from tests.local.runs import Place, mark_of

from marlaas_api.bus_users import BusKeys, OrchestratorUser, mint, server_config
from marlaas_api.nats_server import EmbeddedNats

SEED = re.compile(r"\bS[AOU][A-Z2-7]{50,}")


def test_ctrl_c_drains_and_the_same_command_goes_on(place: Place) -> None:
    place.script(pause_at=2)
    run = place.start()
    run.until(type="progress", step=2)
    run.process.send_signal(signal.SIGINT)
    assert run.end() == 130
    assert run.processes() == []
    assert "trainer has drained" in place.log("trainer-0.tiny.log")
    assert any("to continue later, run: marlaas run" in str(line.get("message")) for line in run.told)
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
    _, alive = psutil.wait_procs([process for process in everything if mark_of(process)], timeout=60)
    assert [process for process in alive if mark_of(process)] == []
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


def test_a_second_run_into_the_same_folder_is_refused(place: Place) -> None:
    place.script(pause_at=1)
    first = place.start()
    first.until(type="progress", step=1)
    second = place.start()
    assert second.end() == 2
    assert f"process {first.process.pid}" in str(second.told[-1]["message"])
    place.go()
    assert first.end() == 0


def contents(folder: Path) -> list[str]:
    """All files as text, while their writers are at work: a temporary file or folder that is gone again is left out."""
    said = []
    for root, _, names in os.walk(folder):
        for path in (Path(root, name) for name in names):
            with contextlib.suppress(FileNotFoundError):
                if path.is_file():
                    said.append(path.read_bytes().decode(errors="replace"))
    return said


def test_every_role_connects_as_itself_and_no_secret_lies_where_others_look(place: Place) -> None:
    place.script(pause_at=1)
    run = place.start()
    run.until(type="progress", step=1)
    said = [" ".join([*process.cmdline(), *process.environ().values()]) for process in run.processes()]
    said += contents(place.folder)
    place.go()
    assert run.end() == 0
    names = [path.stem for path in place.folder.glob("*.connected")]
    users = {name.rpartition(".")[0] if name.startswith("sandbox") else name for name in names}
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
