"""Usage of a run's processes by role, read from /proc, and of its NATS server, read from its monitoring endpoint; as JSON lines."""

import itertools
import json
import os
import threading
import time
import urllib.request
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_TICKS = os.sysconf("SC_CLK_TCK")
_HTTP_S = 5.0
ROLE_MODULES = ("marlaas_worker", "bench.changed_run")


@dataclass(slots=True)
class _Process:
    role: str
    parent: int
    cpu_s: float = 0.0


@dataclass(slots=True)
class UsageRecorder:
    """Records processor seconds by role once a second, and every `memory_every_s` seconds also memory, open files and threads.

    A dead process's time is that of its last sample, unless its parent has waited for it and so accounts for it.
    store: folder of the run's NATS server; with memory, also the state of its streams is recorded, if it has a monitoring
    endpoint.
    """

    runner: int
    path: Path
    store: Path
    memory_every_s: int = 5
    stop: threading.Event = field(default_factory=threading.Event)
    _known: dict[int, _Process] = field(default_factory=dict)
    _gone: dict[str, float] = field(default_factory=dict)

    def record(self) -> None:
        with self.path.open("w") as sink:
            number = 0
            while True:
                ended = self.stop.wait(1.0)
                sample = self._sample(with_memory=number % self.memory_every_s == 0)
                number += 1
                if sample["cpu_s"]:
                    sink.write(json.dumps(sample) + "\n")
                    sink.flush()
                if ended:
                    return

    def _sample(self, with_memory: bool) -> dict[str, Any]:
        self._follow(_stats())
        cpu_s = dict(self._gone)
        for process in self._known.values():
            cpu_s[process.role] = cpu_s.get(process.role, 0.0) + process.cpu_s
        return {"at": time.time(), "cpu_s": cpu_s} | (self._details() if with_memory else {})

    def _follow(self, stats: "dict[int, _Stat]") -> None:
        live = _descendants(self.runner, stats)
        for pid in live:
            stat = stats[pid]
            process = self._known.get(pid) or _Process(self._role(pid, stat.parent), stat.parent)
            process.cpu_s = stat.own_s + (stat.waited_s if _accounts_for_children(process.role) else 0.0)
            self._known[pid] = process
        for pid in self._known.keys() - live:
            process = self._known.pop(pid)
            parent = self._known.get(process.parent)
            if parent is None or not _accounts_for_children(parent.role):
                self._gone[process.role] = self._gone.get(process.role, 0.0) + process.cpu_s

    def _details(self) -> dict[str, Any]:
        memory, files, threads = Counter[str](), Counter[str](), Counter[str]()
        for pid, process in self._known.items():
            memory[process.role] += _pss(pid)
            files[process.role] += _num_entries(pid, "fd")
            threads[process.role] += _num_entries(pid, "task")
        found = {"pss_bytes": dict(memory), "files": dict(files), "threads": dict(threads)}
        streams = streams_of(self.store)
        return found | ({"streams": streams} if streams else {})

    def _role(self, pid: int, parent: int) -> str:
        line = _command(pid)
        for word, following in itertools.pairwise(line):
            if word in ROLE_MODULES and following != "run":
                return following
        if line and line[0].endswith("nats-server"):
            return "nats-server"
        if "marlaas.local.curves" in line:
            return "curves"
        inherited = self._known.get(parent)
        return inherited.role if inherited else "runner"


def streams_of(store: Path) -> dict[str, dict[str, int]]:
    """Return messages, bytes, subjects and consumers of each stream of a server; empty if it has no monitoring endpoint."""
    try:
        ports = json.loads(next(store.glob("nats-server_*.ports")).read_text())
        with urllib.request.urlopen(f"{ports['monitoring'][0]}/jsz?accounts=1&streams=1", timeout=_HTTP_S) as answer:
            return streams_in(json.load(answer))
    except (OSError, StopIteration, KeyError, IndexError, ValueError):
        return {}


def streams_in(answer: dict[str, Any]) -> dict[str, dict[str, int]]:
    """Return the same from an answer of the endpoint."""
    details = [one for account in answer.get("account_details") or () for one in account.get("stream_detail") or ()]
    names = {"messages": "messages", "bytes": "bytes", "subjects": "num_subjects", "consumers": "consumer_count"}
    return {one["name"]: {name: int(one["state"].get(key, 0)) for name, key in names.items()} for one in details}


def _accounts_for_children(role: str) -> bool:
    """Return whether the processor time of a role's dead children counts as the parent's. The runner's children are roles."""
    return role != "runner"


@dataclass(frozen=True, slots=True)
class _Stat:
    """A process. own_s: its processor seconds; waited_s: those of the children that it has waited for."""

    parent: int
    own_s: float
    waited_s: float


def _stats() -> dict[int, _Stat]:
    """Return all processes by id."""
    found = {}
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            try:
                fields = Path(entry.path, "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            user, system, waited_user, waited_system = map(int, fields[11:15])
            found[int(entry.name)] = _Stat(
                int(fields[1]), (user + system) / _TICKS, (waited_user + waited_system) / _TICKS
            )
    return found


def _descendants(root: int, stats: dict[int, _Stat]) -> set[int]:
    children: dict[int, list[int]] = {}
    for pid, stat in stats.items():
        children.setdefault(stat.parent, []).append(pid)
    found, queue = set(), [root] if root in stats else []
    while queue:
        pid = queue.pop()
        found.add(pid)
        queue += children.get(pid, [])
    return found


def _command(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return []


def _pss(pid: int) -> int:
    try:
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) << 10
    except OSError:
        pass
    return 0


def _num_entries(pid: int, folder: str) -> int:
    try:
        return sum(1 for _ in Path(f"/proc/{pid}/{folder}").iterdir())
    except OSError:
        return 0
