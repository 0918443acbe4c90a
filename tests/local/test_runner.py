"""The runner as a process, around a real nats-server, with scripted roles: one story of runs in one folder, and runs that fail."""

import contextlib
import json
import os
import re
import signal
import time
from pathlib import Path

import psutil
import pytest
from bench import hub_server
from tensorboard.backend.event_processing.plugin_event_multiplexer import EventMultiplexer
from tests.local.runs import JOB, POOL, mark_of, placed, share_of
from tests.tables import data
from typer.testing import CliRunner

from marlaas.cli.app import build
from marlaas.local.folder import OutFolder
from marlaas_api.bus_users import BusKeys, OrchestratorUser, mint, server_config
from marlaas_api.cpu_shares import COMPUTE_SHARE
from marlaas_api.errors import InvalidInput
from marlaas_api.nats_server import EmbeddedNats

pytestmark = [pytest.mark.processes, pytest.mark.slow]

HAS_SHARES = Path("/proc/self/autogroup").exists()
SECRET = re.compile(r"\bS[AOU][A-Z2-7]{50,}")
FIRST, KILLED, LONGER = 3, 4, 5
"""Steps of `reverse` at first, when its runner is killed, and at last."""
STEPS = {"reverse": FIRST, "spell": 3, "other": 3, "added": 2}
"""Of the jobs that end. `other` is another tenant's, and `added` is submitted while the run goes on."""


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
    """A folder in which a run was changed and stopped, continued, killed with its runner, and ended."""
    with (
        placed(tmp_path_factory.mktemp("story")) as here,
        hub_server.serving() as hub,
        pytest.MonkeyPatch.context() as patch,
    ):
        for name, value in {"HF_ENDPOINT": hub.url, "HF_TOKEN": hub_server.TOKEN, "HF_HUB_OFFLINE": "0"}.items():
            patch.setenv(name, value)
        stop_a_run(here)
        continue_it(here, hub)
        kill_the_runner(here)
        yield here


def write_jobs(place, **steps: int):
    """Write the manifest; `reverse` is told to a tracker and uploaded to the hub, and `other` belongs to another tenant."""
    place.write(**steps)
    manifest = place.folder / "jobs.yaml"
    text = manifest.read_text().replace(
        "training:", "export: {trackers: [tensorboard], hub: {repo: acme/reverse}}\n  training:", 1
    )
    moved = text.replace("name: other, namespace: team-a", "name: other, namespace: team-b")
    manifest.write_text(moved + data(__file__, "tenant"))


def refused(place, words):
    run = place.start()
    assert run.end() == 2
    assert [line["type"] for line in run.told] == ["error"]
    assert words in str(run.told[0]["message"])


def stop_a_run(place):
    """Jobs are changed, and Ctrl-C drains. That each role may be killed meanwhile: tests/loop/tour.py."""
    write_jobs(place, **{name: steps for name, steps in STEPS.items() if name != "added"}, extra=3)
    place.script(pause_at=2)
    run = place.start()
    for job in ("team-a/reverse", "team-a/spell", "team-b/other"):
        run.told_of(type="progress", job=job, step=2)
    run.told_of(type="status", message="training")
    assert_shares(run)
    assert_no_secrets(place, run)
    refused(place, f"process {run.process.pid}")

    change(place, run)
    run.process.send_signal(signal.SIGINT)
    assert run.end() == 130
    assert run.processes() == []
    assert "trainer has drained" in place.log("trainer-0.tiny.log")
    assert any("to continue later, run: marlaas run" in str(line.get("message")) for line in run.told)
    assert place.summary()["team-a/reverse"]["phase"] == "Running"
    cancelled = OutFolder(place.out).read_record().cancelled
    assert [job.ref.name for job in cancelled] == ["extra"], "withdrawn, and not deleted by an orchestrator yet"


def assert_shares(run):
    """The trainer has a smaller share of the CPU, and the engine chooses its own."""
    assert "--share-cpu" in run.role("rollout").cmdline()
    if HAS_SHARES:
        shares = {"orchestrator": 0, "rollout": 0, "trainer": COMPUTE_SHARE}
        assert {role: share_of(run.role(role).pid) for role in shares} == shares


def assert_no_secrets(place, run):
    """No secret lies where others look: in command lines, variables and files."""
    said = [" ".join([*process.cmdline(), *process.environ().values()]) for process in run.processes()]
    for root, _, names in os.walk(place.folder):
        for path in (Path(root, name) for name in names):
            with contextlib.suppress(FileNotFoundError):  # a temporary file
                said += [path.read_bytes().decode(errors="replace")] if path.is_file() else []
    assert len(said) > 20
    assert not [text for text in said if SECRET.search(text)]


def command(place, *words: str, code=0):
    arguments = [*words, "--run", str(place.out)]
    done = CliRunner().invoke(build(arguments), arguments)
    is_refused = isinstance(done.exception, InvalidInput)
    assert (2 if is_refused else done.exit_code) == code, done.output
    return str(done.exception) if is_refused else done.output


def change(place, run):
    said = command(place, "why", "reverse")
    assert said.startswith("team-a/reverse has been running for ")
    assert ", at step 2 of 3, version 2, " in said
    added = place.folder / "added.yaml"
    added.write_text(POOL % (place.folder / "model") + JOB % ("added", STEPS["added"]))
    assert command(place, "submit", str(added)) == "team-a/added: added\n"
    run.told_of(type="progress", job="team-a/added", phase="Succeeded")
    assert "has no job nowhere: its jobs are team-a/reverse, " in command(place, "suspend", "nowhere", code=2)
    assert command(place, "cancel", "extra").startswith("team-a/extra: cancelled;")


def continue_it(place, hub):
    """The same command goes on. Once more, it prints the summary and starts nothing; manifests that do not fit are refused.

    The hub refuses the first upload, which the second command repeats.
    """
    refused(place, "job team-a/added was started in this output folder and is missing from the manifests")
    write_jobs(place, **STEPS, extra=3)
    refused(place, "has the files of a cancelled job")
    write_jobs(place, **STEPS)
    place.go()
    hub.failures["commit"] = [403]
    run = place.start()
    assert (run.end(), list(hub.models.values())) == (1, [(True, {})])
    assert run.processes() == []
    assert any("tensorboard --logdir" in str(line.get("message")) for line in run.told)
    again = place.start()
    assert again.end() == 0
    assert [line["type"] for line in again.told] == ["note", "summary", "status", "note"]
    assert again.told[1]["jobs"] == place.summary()
    assert "adapter_config.json" in hub.models["acme/reverse"][1]


def kill_the_runner(place):
    """More steps take a finished job further. Nothing outlives a runner that is killed, and the same command goes on."""
    assert place.steps() == list(range(FIRST))
    write_jobs(place, **STEPS | {"reverse": LONGER})
    (place.folder / "go").unlink()
    place.script(pause_at=KILLED)
    run = place.start()
    run.until(type="progress", job="team-a/reverse", step=KILLED)
    everything = [process for process in run.processes() if process.pid != run.process.pid]
    assert len(everything) >= 7
    run.process.kill()
    run.process.wait()
    psutil.wait_procs([process for process in everything if mark_of(process)], timeout=60)
    assert [process for process in everything if mark_of(process)] == []
    place.go()
    assert place.start().end() == 0


def test_the_runs_end_with_everything_a_person_wants_of_the_jobs(ended):
    done = {"phase": "Succeeded", "steps": 3, "policyVersion": 3, "wallSeconds": 60.0}
    rest = {"evalBefore": 0.25, "evalAfter": 0.75, "faults": {"env": 1}, "trainingFaults": {}}
    assert ended.summary()["team-a/spell"] == {**done, **rest}
    job = ended.out / "team-a" / "spell"
    config = json.loads((job / "adapter" / "adapter_config.json").read_text())
    assert (config["r"], Path(config["base_model_name_or_path"]).name) == (8, "model")
    assert (job / "curve.png").read_bytes().startswith(b"\x89PNG")
    assert [json.loads(line)["version"] for line in (job / "evals.jsonl").read_text().splitlines()] == [0, 3]
    assert "trainer starts" in (job / "logs" / "trainer-0.tiny.log").read_text()


def test_every_step_is_recorded_and_told_to_the_tracker_once(ended):
    """However often the run is stopped and killed. The files of the cancelled job stay."""
    expected = {"reverse": LONGER, "spell": 3, "added": 2, "extra": 2}
    assert {name: ended.steps(name) for name in expected} == {name: [*range(n)] for name, n in expected.items()}
    assert "team-a/extra" not in ended.summary()
    events = EventMultiplexer().AddRunsFromDirectory(str(ended.out / "team-a" / "reverse" / "tensorboard"))
    events.Reload()
    assert sorted(event.step for event in events.Tensors(".", "reward/train")) == list(range(1, LONGER + 1))
    assert sorted(event.step for event in events.Tensors(".", "reward/held_out")) == [0, FIRST, LONGER]


def test_every_role_connects_as_itself_and_commands_for_a_run_that_has_ended_say_so(ended):
    names = [path.stem for path in ended.folder.glob("*.connected")]
    users = {name.rpartition(".")[0] if name.startswith("sandbox") else name for name in names}
    sandboxes = {f"sandbox.team-a.{job}" for job in ("reverse", "spell", "extra", "added")} | {"sandbox.team-b.other"}
    assert users == {"orchestrator", "rollout.tiny", "trainer.tiny", *sandboxes}
    assert "no `marlaas run` uses" in command(ended, "resume", "spell", code=2)
    assert re.match(r"team-a/added succeeded .* ago, at step 2 of 2, version 2, ", command(ended, "why", "added"))


def test_ctrl_c_twice_ends_everything_at_once(place):
    place.script(pause_at=1, stubborn=True)
    run = place.start()
    run.until(type="progress", step=1)
    run.process.send_signal(signal.SIGINT)
    run.until(type="note")
    run.process.send_signal(signal.SIGINT)
    assert run.end() == 130
    assert run.processes() == []


def test_what_only_a_person_can_mend_fails_one_job_at_once_and_goes_on_when_it_is_mended(place):
    place.write(reverse=3, spell=2)
    place.script(refusal="no such environment", pause_at=1)
    run = place.start()
    run.until(type="note")
    place.go()
    assert run.end() == 1
    (failed,) = [entry for entry in place.summary().values() if entry["phase"] == "Failed"]
    assert "no such environment; not restarted" in str(failed["message"])
    assert sorted(entry["phase"] for entry in place.summary().values()) == ["Failed", "Succeeded"]
    assert place.start().end() == 0
    assert {entry["phase"] for entry in place.summary().values()} == {"Succeeded"}


async def test_a_server_that_is_there_already_takes_the_persons_credentials_and_is_left_running(place, tmp_path):
    keys = BusKeys.make()
    async with EmbeddedNats(tmp_path / "nats", extra_config=server_config(keys)) as server:
        without = place.start(server.url)
        assert without.end() == 2
        assert "rejects marlaas run" in str(without.told[-1]["message"])
        creds = tmp_path / "runner.creds"
        creds.write_text(mint(keys, OrchestratorUser(), time.time()))
        assert place.start(server.url, str(creds)).end() == 0
        assert server.pid is not None
        place.out = tmp_path / "other"
        other = place.start(server.url, str(creds))
        assert other.end() == 2
        assert "already has a job team-a/reverse of another run" in str(other.told[-1]["message"])
