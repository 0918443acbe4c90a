"""The runner as a process, around a real nats-server, with scripted roles: a story that many tests read, and runs that fail."""

import json
import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.local.runs import Place, placed
from tests.local.story import KILLED, LONGER, ROLES, SECRET, STOPPED, Story, of_tracker, play

from marlaas.local.folder import OutFolder
from marlaas_api.bus_users import BusKeys, OrchestratorUser, mint, server_config
from marlaas_api.cpu_shares import COMPUTE_SHARE
from marlaas_api.nats_server import EmbeddedNats

HAS_SHARES = Path("/proc/self/autogroup").exists()


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Story]:
    """Runs in one folder: changed, killed and stopped, continued, killed with all it started, and ended."""
    with placed(tmp_path_factory.mktemp("story")) as here:
        yield play(here)


def test_ctrl_c_drains_and_the_same_command_goes_on(story: Story) -> None:
    assert (story.codes["stopped"], story.codes["continued"]) == (130, 0)
    assert story.left["stopped"] == story.left["continued"] == []
    assert "trainer has drained" in story.place.log("trainer-0.tiny.log")
    notes = [str(line.get("message")) for line in story.runs["stopped"].told]
    assert any("to continue later, run: marlaas run" in note for note in notes)
    assert story.summaries["stopped"]["team-a/reverse"]["phase"] == "Running"
    assert story.steps["continued"] == list(range(STOPPED))


@pytest.mark.parametrize("role", ROLES)
def test_a_role_that_is_killed_is_started_again(story: Story, role: str) -> None:
    """No step is counted twice: `test_ctrl_c_drains_and_the_same_command_goes_on`."""
    assert (role if role == "orchestrator" else f"{role}-0") in story.kills[role]
    assert "killed by SIGKILL; it restarts" in story.kills[role]


def test_a_run_ends_with_everything_a_person_wants_of_its_jobs(story: Story) -> None:
    done = {"phase": "Succeeded", "steps": 3, "policyVersion": 3, "wallSeconds": 60.0}
    rest = {"evalBefore": 0.25, "evalAfter": 0.75, "faults": {"env": 1}, "trainingFaults": {}}
    assert story.summaries["continued"]["team-a/spell"] == {**done, **rest}
    job = story.place.out / "team-a" / "spell"
    assert (job / "adapter" / "adapter_config.json").read_text() == '{"r": 8}'
    assert (job / "curve.png").read_bytes().startswith(b"\x89PNG")
    assert [json.loads(line)["version"] for line in (job / "evals.jsonl").read_text().splitlines()] == [0, 3]
    assert f"playing team-a/spell of {story.place.folder / 'games.py'}" in (job / "logs/sandbox-0.log").read_text()
    assert "trainer starts" in (job / "logs" / "trainer-0.tiny.log").read_text()


def test_what_is_told_as_json_is_one_object_per_change_and_a_summary_at_the_end(story: Story) -> None:
    told = story.runs["continued"].told
    levels = [line for line in told if line["type"] == "progress" and line["job"] == "team-a/reverse"]
    assert len(levels) == len({json.dumps(line, sort_keys=True) for line in levels})
    assert (levels[-1]["phase"], levels[-1]["step"], levels[-1]["steps"]) == ("Succeeded", 3, 3)
    (summary,) = (line for line in told if line["type"] == "summary")
    assert summary["jobs"] == story.summaries["continued"]
    assert any("tensorboard --logdir" in str(line.get("message")) for line in told)


def test_a_tracker_hears_of_every_step_once_however_often_the_run_is_stopped(story: Story) -> None:
    folder = story.place.out / "team-a" / "reverse" / "tensorboard"
    assert sorted(of_tracker(folder, "reward/train")) == list(range(1, LONGER + 1))
    assert sorted(of_tracker(folder, "reward/held_out")) == [0, STOPPED, LONGER]


def test_a_finished_run_prints_its_summary_again_and_starts_nothing(story: Story) -> None:
    told = story.runs["again"].told
    assert story.codes["again"] == 0
    assert [line["type"] for line in told] == ["note", "summary"]
    assert told[-1]["jobs"] == story.summaries["continued"]


def test_nothing_outlives_a_runner_that_is_killed_and_the_same_command_goes_on(story: Story) -> None:
    assert story.num_roles >= 7
    assert story.left["killed"] == story.left["longer"] == []
    assert story.codes["longer"] == 0


def test_more_steps_take_a_finished_job_further(story: Story) -> None:
    assert STOPPED < KILLED < LONGER
    assert story.steps["longer"] == list(range(LONGER))
    assert story.summaries["longer"]["team-a/reverse"]["steps"] == LONGER


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("without a job", "job team-a/added was started in this output folder and is missing from the manifests"),
        ("the cancelled job's name", "has the files of a cancelled job"),
        ("fewer steps", "spec.training.steps was 3 and is now 2"),
    ],
)
def test_a_manifest_that_does_not_fit_is_refused_before_anything_starts(story: Story, name: str, words: str) -> None:
    assert story.codes[name] == 2
    assert words in story.refused[name]


def test_a_second_run_into_the_same_folder_is_refused(story: Story) -> None:
    assert story.codes["second"] == 2
    assert f"process {story.runs['stopped'].process.pid}" in story.refused["second"]


def test_jobs_are_added_suspended_resumed_and_cancelled_while_the_run_goes_on(story: Story) -> None:
    said = {name: text for name, (_, text) in story.commands.items()}
    assert said["why reverse"].startswith("team-a/reverse has been running for ")
    assert ", at step 2 of 3, version 2, " in said["why reverse"]
    assert "Admitted: The job is admitted to its pool" in said["why reverse"]
    assert said[f"submit {story.place.folder / 'added.yaml'}"] == "team-a/added: added\n"
    assert said["suspend reverse"] == "team-a/reverse: suspended\n"
    assert said["cancel extra"].split(";")[0] == "team-a/extra: cancelled"
    assert [job.ref.name for job in OutFolder(story.place.out).read_record().cancelled] == ["extra"]
    assert "team-a/extra" not in story.summaries["continued"]
    assert story.place.steps("extra") == [0, 1], "its files stay"
    assert story.place.steps("added") == [0, 1]


@pytest.mark.parametrize(
    ("name", "code", "words"),
    [
        ("suspend nowhere", 2, "has no job nowhere: its jobs are team-a/reverse, "),
        ("resume spell", 2, "no `marlaas run` uses"),
        ("why added", 0, "team-a/added succeeded "),
    ],
)
def test_commands_say_what_cannot_be_changed_and_what_was_left(story: Story, name: str, code: int, words: str) -> None:
    found, said = story.commands[name]
    assert found == code
    assert words in said


def test_every_role_connects_as_itself_and_no_secret_lies_where_others_look(story: Story) -> None:
    names = [path.stem for path in story.place.folder.glob("*.connected")]
    users = {name.rpartition(".")[0] if name.startswith("sandbox") else name for name in names}
    sandboxes = {f"sandbox.team-a.{job}" for job in ("reverse", "spell", "extra", "added")} | {"sandbox.team-b.other"}
    assert users == {"orchestrator", "rollout.tiny", "trainer.tiny", *sandboxes}
    assert len(story.lines) >= 8
    assert len(story.files) > 10
    assert not [text for text in (*story.lines, *story.files) if SECRET.search(text)]


@pytest.mark.skipif(not HAS_SHARES, reason="this kernel has no CPU shares of sessions (CONFIG_SCHED_AUTOGROUP)")
def test_the_trainer_has_a_smaller_share_of_the_cpu_and_the_engine_chooses_its_own(story: Story) -> None:
    assert story.niceness == {"orchestrator": 0, "rollout": 0, "trainer": COMPUTE_SHARE}
    assert any("--share-cpu" in line and " rollout " in line for line in story.lines)


@pytest.mark.skipif(
    not HAS_SHARES or os.geteuid() != 0, reason="shares of the CPU by tenant need root, and shares of sessions"
)
def test_a_tenants_sandboxes_share_the_cpu_however_many_they_are(story: Story) -> None:
    niceness = dict(story.sandboxes)
    assert niceness["team-b"] == 0
    assert niceness["team-a"] > 0
    assert len(story.sandboxes) == 4


def test_ctrl_c_twice_ends_everything_at_once(place: Place) -> None:
    place.script(pause_at=1, stubborn=True)
    run = place.start()
    run.until(type="progress", step=1)
    run.process.send_signal(signal.SIGINT)
    run.until(type="note")
    run.process.send_signal(signal.SIGINT)
    assert run.end() == 130
    assert run.processes() == []


def test_a_role_that_always_dies_is_given_up_with_its_own_words(place: Place) -> None:
    place.script(rollout={"how": "raise", "text": "No common block size for 16", "times": 99})
    assert place.start().end() == 1
    entry = place.summary()["team-a/reverse"]
    assert (entry["phase"], entry["reason"]) == ("Failed", "RoleFailed")
    last_words = "ValueError: No common block size for 16; not restarted after 3 exits in a row"
    assert f"rollout-0 (tiny) exited: {last_words}" in entry["message"]
    assert "Traceback" in place.log("rollout-0.tiny.log")


def test_what_only_a_person_can_mend_fails_one_job_at_once_and_goes_on_when_it_is_mended(place: Place) -> None:
    place.write(reverse=3, spell=2)
    place.script(sandbox={"how": "invalid", "text": "no such environment", "times": 1}, pause_at=1)
    run = place.start()
    run.until(type="note")
    place.go()
    assert run.end() == 1
    (failed,) = [name for name, entry in place.summary().items() if entry["phase"] == "Failed"]
    assert "no such environment; not restarted" in place.summary()[failed]["message"]
    assert sorted(entry["phase"] for entry in place.summary().values()) == ["Failed", "Succeeded"]
    assert place.start().end() == 0
    assert {entry["phase"] for entry in place.summary().values()} == {"Succeeded"}


async def test_a_server_that_is_there_already_takes_the_persons_credentials_and_is_left_running(
    place: Place, tmp_path: Path
) -> None:
    keys = BusKeys.make()
    async with EmbeddedNats(tmp_path / "nats", extra_config=server_config(keys)) as server:
        refused = place.start(server.url)
        assert refused.end() == 2
        assert "rejects marlaas run" in str(refused.told[-1]["message"])
        creds = tmp_path / "runner.creds"
        creds.write_text(mint(keys, OrchestratorUser(), time.time()))
        assert place.start(server.url, str(creds)).end() == 0
        assert server.pid is not None
        place.out = tmp_path / "other"
        other = place.start(server.url, str(creds))
        assert other.end() == 2
        assert re.search("already has a job team-a/reverse of another run", str(other.told[-1]["message"]))
