"""What loading an environment leaves behind: open files, connections, threads, child processes, and generators.

An environment is loaded once, and every episode is a fork of that process. So episodes share the offset of an open file and
the answers on a connection, have no threads, and repeat the numbers of a generator that was made before. Child processes are
ended. `marlaas env play` and the fork server of a job call the same functions, and say the same sentences.
"""

import contextlib
import io
import os
import random
import socket
import stat
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FunctionType, ModuleType

from marlaas_api.errors import InvalidInput
from marlaas_api.last_words import visible

HOOK = "start_episode"
MAX_TOLD = 8
MAX_CHARACTERS = 600
_MAX_OBJECTS, _MAX_ITEMS, _MAX_DEPTH = 5000, 100, 3
_MAX_NAMES = 5
_DO = f"in `{HOOK}`, which runs in each episode's process (docs/reference/environments.md)"


@dataclass(frozen=True, slots=True)
class ProcessState:
    """What a process has: descriptors with their targets, child processes, threads by identifier, and names of imported modules."""

    descriptors: Mapping[int, str]
    children: frozenset[int]
    threads: frozenset[int]
    modules: frozenset[str]

    @classmethod
    def now(cls) -> "ProcessState":
        """Return the present state of this process."""
        threads = frozenset(ident for ident, _ in _threads())
        return cls(_descriptors(), frozenset(_children()), threads, frozenset(sys.modules))


def told(before: ProcessState, code: object, *, has_hook: bool) -> tuple[str, ...]:
    """Return a sentence for each kind of thing that loading has left behind and that may be harmless.

    Args:
        before: the state before the environment's module was imported.
        code: the environment's function, or its object.
        has_hook: the environment has a `start_episode`, which can replace generators.

    Raises:
        InvalidInput: the environment holds a connection, or a file that is open for reading: episodes would mix their contents.
    """
    objects = list(_objects(before, code))
    opened = {number: target for number, target in _descriptors().items() if before.descriptors.get(number) != target}
    names = {number: name for name, one in objects if (number := _descriptor_of(one)) in opened}
    for name, one in objects:
        if (number := _descriptor_of(one)) in opened:
            _refuse(name, one, number, opened[number])
    sentences = [*_of_descriptors(opened, names), *_of_threads(before), *_of_children(before)]
    if not has_hook:
        sentences += _of_generators(name for name, one in objects if _is_generator(one))
    return tuple(visible(one)[:MAX_CHARACTERS] for one in sentences[:MAX_TOLD])


def _refuse(name: str, one: object, number: int, target: str) -> None:
    """Raise InvalidInput for a descriptor that the environment holds and that episodes would share."""
    if (peer := _peer(number)) is not None:
        raise InvalidInput(
            f"loading the environment leaves the connection {name}{peer} open, and the answers of different episodes would be mixed on it: connect {_DO}"
        )
    if _reads(number) and not _is_at_end(one):
        raise InvalidInput(
            f"loading the environment leaves the file {name} ({target}) open for reading, and all episodes would share its position: read it and close it "
            f"while loading, or open it {_DO}"
        )


def _of_descriptors(opened: Mapping[int, str], names: Mapping[int, str]) -> Iterator[str]:
    files = [
        names.get(number, target) for number, target in opened.items() if _is_file(number) and not _appends(number)
    ]
    if files:
        yield f"loading the environment leaves files open ({_listed(files)}); all episodes share their positions: close them, or open them {_DO}"
    sockets = [names.get(one, f"descriptor {one}{_peer(one) or ''}") for one in opened if _is_socket(one)]
    if sockets:
        yield (
            f"loading the environment leaves connections open ({_listed(sockets)}); an episode that uses one may read the answers of another: "
            f"close them, or connect {_DO}"
        )


def _of_threads(before: ProcessState) -> Iterator[str]:
    started = [name for ident, name in _threads() if ident not in before.threads]
    if started:
        yield f"loading the environment starts threads ({_listed(started)}), which do not exist in an episode: start them {_DO}"


def _of_children(before: ProcessState) -> Iterator[str]:
    started = [_command(pid) for pid in _children() if pid not in before.children]
    if started:
        yield f"loading the environment starts processes ({_listed(started)}), which are ended before the first episode: start them {_DO}"


def _of_generators(names: Iterable[str]) -> Iterator[str]:
    if made := list(names):
        yield (
            f"loading the environment makes generators of random numbers ({_listed(made)}), which repeat the same numbers in every episode: "
            f"draw from `task.rng`, or make them {_DO}"
        )


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else ""
    return ", ".join(names[:_MAX_NAMES]) + more


def _objects(before: ProcessState, code: object) -> Iterator[tuple[str, object]]:
    """Yield the objects that the environment's own modules, classes and object hold, with names for people."""
    modules = _own_modules(before)
    owner = getattr(code, "__self__", None)
    roots: list[tuple[str, object]] = [] if owner is None else [("self", owner)]
    roots += [(name, sys.modules[name]) for name in modules]
    seen: set[int] = set()
    waiting = [(name, one, 0) for name, one in reversed(roots)]
    while waiting and len(seen) < _MAX_OBJECTS:
        name, one, depth = waiting.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        yield name, one
        if depth < _MAX_DEPTH:
            waiting += [(part, held, depth + 1) for part, held in _held(name, one, modules)]


def _held(name: str, one: object, modules: frozenset[str]) -> Iterator[tuple[str, object]]:
    """Yield what an object holds: items of a container, attributes otherwise; of modules and classes only the environment's own."""
    if isinstance(one, list | tuple | set | frozenset):
        yield from ((f"{name}[…]", item) for item in list(one)[:_MAX_ITEMS])
    elif isinstance(one, dict):
        yield from ((f"{name}[{key!r:.40}]", item) for key, item in list(one.items())[:_MAX_ITEMS])
    elif isinstance(one, ModuleType | type):
        name_of = one.__name__ if isinstance(one, ModuleType) else one.__module__
        shown = [(key, item) for key, item in list(vars(one).items()) if not key.startswith("__")]
        yield from ((f"{name}.{key}", item) for key, item in shown if name_of in modules)
    elif not isinstance(one, FunctionType):
        with contextlib.suppress(Exception):
            attributes = dict(object.__getattribute__(one, "__dict__"))
            yield from ((f"{name}.{key}", item) for key, item in list(attributes.items())[:_MAX_ITEMS])


def _own_modules(before: ProcessState) -> frozenset[str]:
    """Return the modules that loading has imported and that are neither Python's nor installed packages'."""
    paths = sysconfig.get_paths()
    installed = tuple(f"{paths[key]}{os.sep}" for key in ("stdlib", "platstdlib", "purelib", "platlib"))
    new = [(name, module) for name, module in list(sys.modules.items()) if name not in before.modules]
    files = {name: str(getattr(module, "__file__", None) or "") for name, module in new}
    return frozenset(name for name, file in files.items() if file and not file.startswith(installed))


def _descriptors() -> dict[int, str]:
    found: dict[int, str] = {}
    with contextlib.suppress(OSError):
        for name in os.listdir("/proc/self/fd"):  # noqa: PTH208
            with contextlib.suppress(OSError):  # the folder's own descriptor is closed already
                found[int(name)] = os.readlink(f"/proc/self/fd/{name}")  # noqa: PTH115
    return found


def _descriptor_of(one: object) -> int:
    """Return the descriptor of a file, a socket or another object with `fileno`; -1 if it has none."""
    if not callable(getattr(type(one), "fileno", None)) or isinstance(one, type):
        return -1
    with contextlib.suppress(Exception):  # closed, or without a descriptor
        number = one.fileno()  # type: ignore[attr-defined]
        return number if isinstance(number, int) else -1
    return -1


def _mode(number: int) -> int:
    try:
        return os.fstat(number).st_mode
    except OSError:
        return 0


def _is_file(number: int) -> bool:
    return stat.S_ISREG(_mode(number))


def _is_socket(number: int) -> bool:
    """Whether it is a socket; those of a pair within this process, as an event loop has, do not count."""
    return stat.S_ISSOCK(_mode(number)) and _peer(number) != ""


def _flags(number: int) -> int:
    """Return the flags with which a descriptor was opened."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        text = Path(f"/proc/self/fdinfo/{number}").read_text(encoding="ascii")
        return int(text.partition("flags:")[2].split()[0], 8)
    return 0


def _reads(number: int) -> bool:
    return _is_file(number) and _flags(number) & os.O_ACCMODE == os.O_RDONLY


def _appends(number: int) -> bool:
    return bool(_flags(number) & os.O_APPEND)


def _is_at_end(one: object) -> bool:
    """Whether a file was read to its end, so that its position means nothing any more."""
    with contextlib.suppress(Exception):
        assert isinstance(one, io.IOBase)
        return one.tell() >= os.fstat(one.fileno()).st_size
    return False


def _peer(number: int) -> str | None:
    """Return ` to ADDRESS` for a connected socket, an empty text for one end of a pair, and None for anything else."""
    if not stat.S_ISSOCK(_mode(number)):
        return None
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(number)) as copy:
        address = copy.getpeername()
        return f" to {address[0]}:{address[1]}" if isinstance(address, tuple) else f" to {address}" if address else ""
    return None


def _threads() -> list[tuple[int, str]]:
    """Return the threads of Python besides the main one and tqdm's, which only redraws. `threading` is not imported for this."""
    threading = sys.modules.get("threading")
    if threading is None:
        return []
    others = (one for one in threading.enumerate() if one is not threading.main_thread())
    return [(one.ident or 0, one.name) for one in others if not type(one).__module__.startswith("tqdm.")]


def _children() -> list[int]:
    found: list[int] = []
    with contextlib.suppress(OSError):
        for thread in os.listdir("/proc/self/task"):  # noqa: PTH208
            with contextlib.suppress(OSError):
                found += map(int, Path(f"/proc/self/task/{thread}/children").read_text(encoding="ascii").split())
    return found


def _command(pid: int) -> str:
    with contextlib.suppress(OSError):
        words = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
        return words[:80] or str(pid)
    return str(pid)


def _is_generator(one: object) -> bool:
    """Whether an object is a generator of random numbers that is seeded once: of `random`, numpy or torch, besides their global ones."""
    if isinstance(one, random.Random):
        return not isinstance(one, random.SystemRandom) and one is not getattr(random, "_inst", None)
    numpy, torch = sys.modules.get("numpy.random"), sys.modules.get("torch")
    if numpy is not None and isinstance(one, numpy.Generator | numpy.RandomState):
        return one is not getattr(numpy.mtrand, "_rand", None)
    return torch is not None and isinstance(one, torch.Generator) and one is not torch.default_generator
