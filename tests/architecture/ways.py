"""Follows a way through the code: records the files whose functions run, and reads the list in docs/explanation/architecture.md.

A way is one piece of work (a turn, a pool's pods, a manifest's admission) from its first function to its last.
"""

import contextlib
import inspect
import re
import sys
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from graphlib import TopologicalSorter
from pathlib import Path
from types import CodeType, FrameType

ROOT = Path(__file__).parents[2]
ARCHITECTURE = ROOT / "docs/explanation/architecture.md"
SOURCES = (ROOT / "operator", ROOT / "workers")
_SHARED = (
    *("bus.py", "bus_memory/", "bus_nats/", "bucket_cache.py", "blobs.py", "blobs_memory.py", "background.py"),
    *("messages/", "wire.py", "names.py", "subjects.py", "errors.py", "failpoints.py"),
)
_DATA_STRUCTURES = (
    "fair_queue.py",
    "placement.py",
    "recent.py",
    "sandbox/turn_clock.py",
    *(
        f"rollout/{name}.py"
        for name in (
            "bounded_cache",
            "accounts",
            "request_limiter",
            "kv_budget",
            "engine_meter",
            "engine_failures",
            "turn_record",
            "paging",
            "reload_pace",
            "slot_table",
            "homes",
        )
    ),
)
NOT_COUNTED = (
    *(f"operator/marlaas_api/{module}" for module in _SHARED),
    *(f"workers/marlaas_worker/{module}" for module in _DATA_STRUCTURES),
)
"""Files that every way uses (the bus and its cache, the blob store, messages, names, errors), and data structures."""
_IS_ON_THE_WAY: ContextVar[bool] = ContextVar("is_on_the_way", default=False)


@dataclass
class Way:
    """The files whose functions were called, in order of the first call, and the calls from one file to another.

    Paths are relative to the repository. Only calls in contexts that entered the way count (`files_on_the_way`,
    `enter_way`), so background tasks do not. Resuming a coroutine is not a call.

    left_out: more files that do not count, or beginnings of their paths.
    """

    left_out: tuple[str, ...] = ()
    files: list[str] = field(default_factory=list)
    calls: set[tuple[str, str]] = field(default_factory=set)

    @contextlib.contextmanager
    def recorded(self) -> Iterator[None]:
        """Record calls in this thread, while the context is open."""
        sys.setprofile(self.on_event)
        try:
            yield
        finally:
            sys.setprofile(None)

    def file_of(self, code: CodeType) -> str | None:
        """Return the path of a function's file; None for module and class bodies, and for files that do not count."""
        path = Path(code.co_filename)
        if not code.co_flags & inspect.CO_OPTIMIZED or not any(path.is_relative_to(source) for source in SOURCES):
            return None
        name = path.relative_to(ROOT).as_posix()
        return None if name.startswith((*NOT_COUNTED, *self.left_out)) else name

    def on_event(self, frame: FrameType, event: str, _: object) -> None:
        """Handle an event of `sys.setprofile`."""
        if event != "call" or not _IS_ON_THE_WAY.get() or _is_resumed(frame):
            return
        called = self.file_of(frame.f_code)
        if called is None:
            return
        if called not in self.files:
            self.files.append(called)
        caller = None if frame.f_back is None else self.file_of(frame.f_back.f_code)
        if caller not in (None, called):
            self.calls.add((str(caller), called))

    def require_one_direction(self) -> None:
        """Raise graphlib.CycleError if a file calls one from which it is called, directly or through others."""
        called_by: dict[str, set[str]] = {}
        for caller, called in self.calls:
            called_by.setdefault(called, set()).add(caller)
        TopologicalSorter(called_by).prepare()


@contextlib.contextmanager
def files_on_the_way(*left_out: str) -> Iterator[Way]:
    """Record the files that are called inside this context, and in tasks that it starts.

    left_out: more files that do not count, or beginnings of their paths.
    """
    way, entered = Way(left_out), _IS_ON_THE_WAY.set(True)
    try:
        with way.recorded():
            yield way
    finally:
        _IS_ON_THE_WAY.reset(entered)


def enter_way() -> None:
    """Count the calls of the current context, and of tasks that it starts, as on the way; for tasks that began earlier."""
    _IS_ON_THE_WAY.set(True)


def listed_files(heading: str) -> list[str]:
    """Return the files of a numbered list in docs/explanation/architecture.md, below the heading that begins with these words.

    Each item begins with a path in backquotes, relative to the repository.
    """
    sections = re.split(r"^#+ ", ARCHITECTURE.read_text(), flags=re.MULTILINE)
    (section,) = (section for section in sections if section.startswith(heading))
    return re.findall(r"^\d+\. `([^`]+)`", section, flags=re.MULTILINE)


def _is_resumed(frame: FrameType) -> bool:
    """Return whether a call event is the resumption of a generator or coroutine: its RESUME has an argument above 0."""
    return bool(frame.f_code.co_code[frame.f_lasti + 1] & 3)
