"""The runner as a process: what it ends with, what it starts again, and what it gives up."""

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.local.runs import Place, Run, placed

from marlaas_api.cpu_shares import COMPUTE_SHARE, share_of

JOBS = {"reverse": 3, "spell": 2}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    """A run of two jobs that has ended; not to be changed."""
    with placed(tmp_path_factory.mktemp("finished")) as here:
        here.write(**JOBS)
        (here.folder / "games.py").touch()
        run = here.start()
        assert run.end() == 0
        assert run.processes() == []
        yield here


def test_a_run_ends_with_everything_a_person_wants_of_its_jobs(finished: Place) -> None:
    done = {"phase": "Succeeded", "steps": 3, "policyVersion": 3, "wallSeconds": 60.0}
    rest = {"evalBefore": 0.25, "evalAfter": 0.75, "faults": {"env": 1}, "trainingFaults": {}}
    assert finished.summary()["team-a/reverse"] == {**done, **rest}
    assert (finished.steps(), finished.steps("spell")) == ([0, 1, 2], [0, 1])
    job = finished.out / "team-a" / "spell"
    assert (job / "adapter" / "adapter_config.json").read_text() == '{"r": 8}'
    assert (job / "curve.png").read_bytes().startswith(b"\x89PNG")
    assert [json.loads(line)["version"] for line in (job / "evals.jsonl").read_text().splitlines()] == [0, 2]
    assert f"playing team-a/spell of {finished.folder / 'games.py'}" in (job / "logs" / "sandbox-0.log").read_text()
    assert "trainer starts" in (job / "logs" / "trainer-0.tiny.log").read_text()


def test_what_is_told_as_json_is_one_object_per_change_and_a_summary_at_the_end(finished: Place) -> None:
    told = finished.runs[0].told
    levels = [line for line in told if line["type"] == "progress" and line["job"] == "team-a/reverse"]
    assert len(levels) == len({json.dumps(line, sort_keys=True) for line in levels})
    assert (levels[-1]["phase"], levels[-1]["step"], levels[-1]["steps"]) == ("Succeeded", 3, 3)
    assert told[-1]["type"] == "summary"
    assert told[-1]["jobs"] == finished.summary()


def test_a_finished_run_prints_its_summary_again_and_starts_nothing(finished: Place) -> None:
    again = finished.start()
    assert again.end() == 0
    assert [line["type"] for line in again.told] == ["note", "summary"]
    assert again.told[-1]["jobs"] == finished.summary()


def test_a_manifest_that_changed_too_much_is_refused_before_anything_starts(finished: Place) -> None:
    finished.write(**{**JOBS, "reverse": 2})
    run = finished.start()
    assert run.end() == 2
    finished.write(**JOBS)
    assert [line["type"] for line in run.told] == ["error"]
    assert "spec.training.steps was 3 and is now 2" in str(run.told[0]["message"])


@pytest.mark.parametrize("role", ["orchestrator", "rollout", "trainer", "sandbox"])
def test_a_role_that_is_killed_is_started_again_and_nothing_is_counted_twice(place: Place, role: str) -> None:
    place.script(pause_at=2)
    run = place.start()
    run.told_of(type="progress", step=2)
    run.told_of(type="status", message="training")
    run.named(role).kill()
    told = run.until(type="note")
    assert f"{role if role == 'orchestrator' else role + '-0'}" in told["message"]
    assert "killed by SIGKILL; it restarts" in told["message"]
    place.go()
    assert run.end() == 0
    assert place.steps() == [0, 1, 2]


def shares_of(run: Run, *roles: str) -> dict[str, int]:
    """The niceness of the roles' sessions."""
    return {role: int(Path(f"/proc/{run.named(role).pid}/autogroup").read_text().split()[-1]) for role in roles}


@pytest.mark.skipif(
    not Path("/proc/self/autogroup").exists(),
    reason="this kernel has no CPU shares of sessions (CONFIG_SCHED_AUTOGROUP)",
)
def test_the_trainer_has_a_smaller_share_of_the_cpu_and_the_engine_chooses_its_own(place: Place) -> None:
    place.script(pause_at=2)
    run = place.start()
    run.told_of(type="progress", step=2)
    run.told_of(type="status", message="training")
    shares = {"orchestrator": 0, "rollout": 0, "trainer": COMPUTE_SHARE, "sandbox": 0}
    assert shares_of(run, *shares) == shares
    assert "--share-cpu" in run.named("rollout").cmdline()
    place.go()
    assert run.end() == 0


@pytest.mark.skipif(
    not Path("/proc/self/autogroup").exists() or os.geteuid() != 0,
    reason="shares of the CPU by tenant need root and a kernel with shares of sessions (CONFIG_SCHED_AUTOGROUP)",
)
def test_a_tenants_sandboxes_share_the_cpu_however_many_they_are(place: Place) -> None:
    place.write(reverse=3, spell=3, other=3)
    manifest = place.folder / "jobs.yaml"
    manifest.write_text(
        manifest.read_text().replace("name: other, namespace: team-a", "name: other, namespace: team-b")
    )
    place.script(pause_at=2)
    run = place.start()
    for job in ("team-a/reverse", "team-a/spell", "team-b/other"):
        run.told_of(type="progress", job=job, step=2)
    sandboxes = [one for one in run.processes() if "sandbox" in one.cmdline()]
    tenants = {one.pid: "team-b" if "other" in " ".join(one.cmdline()) else "team-a" for one in sandboxes}
    assert sorted((tenant, share_of(pid)) for pid, tenant in tenants.items()) == [
        ("team-a", 3),  # a half of the weight
        ("team-a", 3),
        ("team-b", 0),
    ]
    place.go()
    assert run.end() == 0


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
    place.script(rollout={"how": "raise", "text": "No common block size for 16", "times": 99})
    run = place.start()
    assert run.end() == 1
    entry = place.summary()["team-a/reverse"]
    assert (entry["phase"], entry["reason"]) == ("Failed", "RoleFailed")
    last_words = "ValueError: No common block size for 16; not restarted after 3 exits in a row"
    assert f"rollout-0 (tiny) exited: {last_words}" in entry["message"]
    assert "Traceback" in place.log("rollout-0.tiny.log")


def test_what_only_a_person_can_mend_is_given_up_at_once_and_goes_on_when_it_is_mended(place: Place) -> None:
    place.script(trainer={"how": "invalid", "text": "adapter rank 64 is above 16", "times": 1})
    assert place.start().end() == 1
    assert "adapter rank 64 is above 16; not restarted" in place.summary()["team-a/reverse"]["message"]
    assert place.log("trainer-0.tiny.log").count("=== start") == 1
    assert place.start().end() == 0
    assert place.summary()["team-a/reverse"]["phase"] == "Succeeded"


def test_a_job_whose_sandbox_cannot_run_fails_while_the_others_go_on(place: Place) -> None:
    place.write(reverse=3, spell=2)
    place.script(sandbox={"how": "invalid", "text": "no such environment", "times": 1}, pause_at=1)
    run = place.start()
    run.until(type="note")
    place.go()
    assert run.end() == 1
    phases = {name: entry["phase"] for name, entry in place.summary().items()}
    assert sorted(phases.values()) == ["Failed", "Succeeded"]
