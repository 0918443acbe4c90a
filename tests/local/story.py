"""Scripted runs that many tests read: a run that is changed, killed, stopped and continued, with what was seen on the way."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil
from tests.local.runs import JOB, POOL, Place, Run, mark_of

from marlaas_api.cpu_shares import share_of

SECRET = re.compile(r"\bS[AOU][A-Z2-7]{50,}")
ROLES = ("orchestrator", "rollout", "trainer", "sandbox")
JOBS = {"reverse": 3, "spell": 3, "other": 3, "extra": 3}
"""Steps of the jobs. `other` is another tenant's, and `extra` is cancelled."""
STOPPED, KILLED, LONGER = 3, 4, 5
"""Steps of `reverse` at first, when its runner is killed, and at last."""


@dataclass
class Story:
    """What was seen of runs in one folder.

    runs: by name. files, lines: what lies on disk, and command lines and variables of all processes, while the run goes on.
    niceness: of the roles' sessions, and of the sandboxes with their tenants. commands: what they printed, with exit codes.
    refused: the last sentences of runs that were refused. left: processes that outlived a stop or a kill of the runner.
    """

    place: Place
    runs: dict[str, Run] = field(default_factory=dict)
    codes: dict[str, int] = field(default_factory=dict)
    files: list[str] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    niceness: dict[str, int] = field(default_factory=dict)
    sandboxes: list[tuple[str, int]] = field(default_factory=list)
    commands: dict[str, tuple[int, str]] = field(default_factory=dict)
    kills: dict[str, str] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    summaries: dict[str, dict[str, dict[str, object]]] = field(default_factory=dict)
    steps: dict[str, list[int]] = field(default_factory=dict)
    left: dict[str, list[psutil.Process]] = field(default_factory=dict)
    num_roles: int = 0

    def refuse(self, name: str, *more: str) -> None:
        """Start a run that is refused."""
        run = self.place.start(*more)
        self.codes[name] = run.end()
        self.refused[name] = str(run.told[-1]["message"])

    def command(self, name: str, *words: str) -> None:
        """Call a command for the run."""
        command = [sys.executable, "-m", "marlaas", name, *words, "--run", str(self.place.out)]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
        self.commands[f"{name} {words[0]}"] = done.returncode, done.stdout + done.stderr

    def ended(self, name: str) -> None:
        """Read a run to its end, and keep what it leaves."""
        self.codes[name] = self.runs[name].end()
        self.left[name] = self.runs[name].processes()
        self.summaries[name] = self.place.summary()
        self.steps[name] = self.place.steps()


def write_jobs(place: Place, **steps: int) -> None:
    """Write the manifest; `reverse` is told to a tracker, and `other` belongs to another tenant."""
    place.write(**steps)
    manifest = place.folder / "jobs.yaml"
    text = manifest.read_text().replace("training:", "export: {trackers: [tensorboard]}\n  training:", 1)
    manifest.write_text(text.replace("name: other, namespace: team-a", "name: other, namespace: team-b"))


def play(place: Place) -> Story:
    """Play all runs of the folder."""
    story = Story(place)
    (place.folder / "games.py").touch()
    added = place.folder / "added.yaml"
    added.write_text(POOL % (place.folder / "model") + JOB % ("added", 2))
    write_jobs(place, **JOBS)
    place.script(pause_at=2)
    first = story.runs["stopped"] = place.start()
    for job in ("team-a/reverse", "team-a/spell", "team-b/other"):
        first.told_of(type="progress", job=job, step=2)
    first.told_of(type="status", message="training")
    _look(story, first)
    story.refuse("second")
    _kill_roles(story, first)
    _change(story, first, added)
    first.process.send_signal(signal.SIGINT)
    story.ended("stopped")
    story.refuse("without a job")
    steps = {name: number for name, number in JOBS.items() if name != "extra"} | {"added": 2}
    write_jobs(place, **steps, extra=3)
    story.refuse("the cancelled job's name")
    write_jobs(place, **steps)
    place.go()
    story.runs["continued"] = place.start()
    story.ended("continued")
    story.runs["again"] = place.start()
    story.ended("again")
    write_jobs(place, **steps | {"reverse": 2})
    story.refuse("fewer steps")
    _kill_the_runner(story, steps | {"reverse": LONGER})
    story.runs["longer"] = place.start()
    story.ended("longer")
    story.command("resume", "spell")
    story.command("why", "added")
    return story


def _look(story: Story, run: Run) -> None:
    """Keep what others can see of the run's processes and files."""
    for process in run.processes():
        story.lines.append(" ".join([*process.cmdline(), *process.environ().values()]))
    story.files = contents(story.place.folder)
    if Path("/proc/self/autogroup").exists():
        pids = {role: run.role(role).pid for role in ROLES if role != "sandbox"}
        story.niceness = {role: share_of(pid) for role, pid in pids.items()}
    for sandbox in (one for one in run.processes() if "sandbox" in one.cmdline()):
        tenant = "team-b" if "other" in " ".join(sandbox.cmdline()) else "team-a"
        story.sandboxes.append((tenant, share_of(sandbox.pid)))


def contents(folder: Path) -> list[str]:
    """All files as text, while their writers are at work: a temporary file or folder that is gone again is left out."""
    said = []
    for root, _, names in os.walk(folder):
        for path in (Path(root, name) for name in names):
            with contextlib.suppress(FileNotFoundError):
                if path.is_file():
                    said.append(path.read_bytes().decode(errors="replace"))
    return said


def _kill_roles(story: Story, run: Run) -> None:
    """Kill each role, and the nats-server, and wait until the role is at work again: each leaves a file when it is."""
    place = story.place
    (temporary,) = (path.parent for path in place.temporary.glob("*/rollout.at-work"))
    marks = {role: temporary / f"{role}.at-work" for role in ("rollout", "trainer")}
    marks |= {"sandbox": place.folder / "reverse.played", "orchestrator": place.folder / "orchestrator.connected"}
    for role in ROLES:
        victim = run.role(role)
        victim.suspend()  # so that it does not make the file again
        marks[role].unlink()
        victim.kill()
        story.kills[role] = str(run.until(type="note")["message"])
        _until(marks[role].exists)
    (server,) = [process for process in run.processes() if process.name() == "nats-server"]
    server.kill()


def _until(wanted: object) -> None:
    """Wait for a file that another process makes."""
    until = time.monotonic() + 120
    while not wanted():  # type: ignore[operator]
        assert time.monotonic() < until
        time.sleep(0.02)


def _change(story: Story, run: Run, added: Path) -> None:
    """Add a job, suspend, resume and cancel others."""
    story.command("why", "reverse")
    story.command("submit", str(added))
    run.told_of(type="progress", job="team-a/added", step=2)
    story.command("suspend", "nowhere")
    for command, phase in (("suspend", "Suspended"), ("resume", "Running")):
        story.command(command, "reverse")
        run.until(type="progress", job="team-a/reverse", phase=phase)
    story.command("cancel", "extra")


def _kill_the_runner(story: Story, steps: dict[str, int]) -> None:
    """Start the run with more steps, and kill the runner within it."""
    place = story.place
    write_jobs(place, **steps)
    (place.folder / "go").unlink()
    place.script(pause_at=KILLED)
    run = story.runs["killed"] = place.start()
    run.until(type="progress", job="team-a/reverse", step=KILLED)
    everything = [process for process in run.processes() if process.pid != run.process.pid]
    story.num_roles = len(everything)
    run.process.kill()
    run.process.wait()
    _, alive = psutil.wait_procs([process for process in everything if mark_of(process)], timeout=60)
    story.left["killed"] = [process for process in alive if mark_of(process)]
    place.go()


def of_tracker(folder: Path, name: str) -> Iterator[int]:
    """Yield the steps of a figure that a tracker has."""
    from tensorboard.backend.event_processing.plugin_event_multiplexer import EventMultiplexer

    events = EventMultiplexer().AddRunsFromDirectory(str(folder))
    events.Reload()
    return (event.step for event in events.Tensors(".", name))
