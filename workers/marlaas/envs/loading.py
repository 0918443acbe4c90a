"""Find an environment by name, check its arguments from the manifest, and create it.

A name is a builtin's or `module:attribute`. The module is imported as usual, from the manifest's folder and
PYTHONPATH. Every error is an InvalidInput that names what was expected, so that a manifest can be checked without
playing.
"""

import difflib
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, get_type_hints

from marlaas.agent_base import AgentBase
from marlaas.environment import Task
from marlaas.environment_types import Play, UnknownAgent
from marlaas.envs import BUILTINS
from marlaas.envs.leftovers import HOOK, ProcessState, told
from marlaas_api.errors import InvalidInput

DEMONSTRATE = "demonstrate"
"""Name of the function that returns a task's demonstration."""
_SCALARS = (bool, int, float, str)
_NUM_GIVEN = 2
COMPARISON = "score_group"
"""Name of the function that compares the episodes of a group."""
_OPTIONAL = {"named_agents": "agents_of", "hook": HOOK, "comparison": COMPARISON, "demonstrate": DEMONSTRATE}
"""Functions that an environment may have, by the field that holds each."""
_ASYNC = "marlaas.async_environment"
"""Imported once for all episodes, which are forked, and only for environments that need it: asyncio takes a while."""


@dataclass(frozen=True, slots=True)
class Environment:
    """An environment that is ready to play.

    is_async: its `play` is `async def`. hook: its `start_episode`, if it has one. notes: sentences of a builtin on its tasks.
    comparison: its `score_group`, if it has one. demonstrate: its function of that name, which returns a task's chat messages
    (`demonstrations`); None: it has none. data_digest: of the files of a builtin's data set (`marlaas.envs.data_digest`); empty: none.
    """

    code: Callable[..., object]
    takes_all_agents: bool
    named_agents: Callable[[Task], object] | None = None
    is_async: bool = False
    hook: Callable[[Task], object] | None = None
    notes: tuple[str, ...] = ()
    comparison: Callable[[Task, Sequence[Play]], object] | None = None
    demonstrate: Callable[[Task], Any] | None = None
    data_digest: str = ""

    @property
    def compares(self) -> bool:
        """Whether the episodes of a group get their rewards by a comparison."""
        return self.comparison is not None

    def score_group(self, task: Task, plays: Sequence[Play]) -> object:
        """Call the environment's `score_group`. Returns and raises what that returns and raises; a coroutine if it is `async def`."""
        assert self.comparison is not None
        return self.comparison(task, plays)

    def agents_of(self, task: Task, names: Sequence[str]) -> tuple[str, ...]:
        """Return the agents that a task calls: those that the environment's `agents_of` names, or all.

        Args:
            names: the job's agents.

        Raises UnknownAgent, InvalidInput (not names), and what the environment's own code raises.
        """
        if self.named_agents is None:
            return tuple(names)
        named = self.named_agents(replace(task))  # a copy, so that `play` draws the same as without `agents_of`
        if isinstance(named, str) or not isinstance(named, Iterable):
            raise InvalidInput(f"`agents_of` returned {named!r:.80}; expected names of agents, such as ('solver',)")
        called = tuple(named)
        if unknown := [name for name in called if name not in names]:
            raise UnknownAgent(f"`agents_of` names {unknown[0]!r:.80}; the job's agents are {', '.join(names)}")
        return called

    def start_episode(self, task: Task) -> Any:
        """Call the environment's `start_episode`, in the episode's process. Returns an awaitable if that is `async def`."""
        return None if self.hook is None else self.hook(replace(task))  # a copy, as for `agents_of`

    def play(self, task: Task, agents: Mapping[str, AgentBase]) -> Any:
        """Play one episode. Returns and raises what the environment's own code returns and raises; a coroutine if it is async."""
        if self.takes_all_agents:
            return self.code(task, agents)
        if len(agents) != 1:
            raise InvalidInput(
                f"the environment takes one agent, but the job has {len(agents)} ({', '.join(agents)}): name its second "
                "parameter `agents` to receive all of them by name"
            )
        return self.code(task, next(iter(agents.values())))


@dataclass(frozen=True, slots=True)
class EnvironmentCode:
    """An environment that was found and whose arguments were checked. None of its code has been called, except on import."""

    name: str
    target: Callable[..., Any]
    args: Mapping[str, Any]

    def check_agents(self, agents: Sequence[str]) -> None:
        """Raise InvalidInput if the environment cannot be played by a job with these agents."""
        what = f"environment {self.name!r}"
        play = _play_of(self.target)
        if len(agents) > 1 and play is not None and not _takes_all(play, has_self=inspect.isclass(self.target)):
            raise InvalidInput(
                f"{what} takes one agent, but the job has {len(agents)} ({', '.join(agents)}): remove the others, or name the second "
                "parameter of `play` `agents` to receive all of them by name"
            )
        if self.name in BUILTINS and (check := getattr(self.target, "check_agents", None)) is not None:
            check(agents, **self.args)
        needed = self.needed_agents()
        agents_of = getattr(self.target, "agents_of", None)
        if agents_of is not None and not callable(agents_of):
            raise InvalidInput(f"{what}: its `agents_of` is {agents_of!r:.80}; expected a function of a task")
        if lacking := [name for name in needed if name not in agents]:
            raise InvalidInput(
                f"{what} needs the agents {', '.join(needed)}; the job lacks {', '.join(lacking)} (its agents: {', '.join(agents)})"
            )

    def needed_agents(self) -> tuple[str, ...]:
        """Return the agents that the environment needs; empty if it does not say. Raises InvalidInput."""
        needed = getattr(self.target, "agents", ())
        if callable(needed):
            needed = needed(**self.args)
        if not isinstance(needed, tuple | list) or not all(isinstance(name, str) for name in needed):
            raise InvalidInput(
                f"environment {self.name!r}: its attribute `agents` is {needed!r:.80}; expected a tuple of agents' names"
            )
        return tuple(needed)

    def check_demonstrates(self) -> None:
        """Raise InvalidInput if the environment has no `demonstrate`."""
        if getattr(self.target, DEMONSTRATE, None) is None:
            raise InvalidInput(
                f"environment {self.name!r} has no function `{DEMONSTRATE}`, and sft trains demonstrations: give it one that returns a list of "
                "chat messages, or choose another training.algorithm"
            )

    def create(self) -> Environment:
        """Create the environment. Raises the exceptions of its `__init__`."""
        is_async = inspect.iscoroutinefunction(_play_of(self.target))
        if is_async:
            importlib.import_module(_ASYNC)
        if inspect.isclass(self.target):
            made: Any = self.target(**self.args)
            is_ours = self.name in BUILTINS
            notes = made.notes if is_ours and hasattr(made, "notes") else ()
            digest = made.data_digest if is_ours and hasattr(made, "data_digest") else ""
            own: dict[str, Any] = {field: getattr(made, name, None) for field, name in _OPTIONAL.items()}
            takes_all = _takes_all(made.play, has_self=False)
            return Environment(made.play, takes_all, is_async=is_async, notes=notes, data_digest=digest, **own)

        def play_with_args(task: Task, agent: object) -> object:
            return self.target(task, agent, **self.args)

        found = {field: getattr(self.target, name, None) for field, name in _OPTIONAL.items()}
        own = {field: None if one is None else partial(one, **self.args) for field, one in found.items()}
        takes_all = _takes_all(self.target, has_self=False)
        return Environment(play_with_args, takes_all, is_async=is_async, **own)


def load(name: str, args: Mapping[str, Any], agents: Sequence[str]) -> tuple[Environment, tuple[str, ...]]:
    """Find, check and create an environment for a job's agents; return also sentences: its notes, and what loading it has left behind.

    Raises:
        InvalidInput: as `resolve` and `check_agents`, or it holds a connection or an open file (`leftovers.told`).
        Other exceptions: of the environment's `__init__`.
    """
    before = ProcessState.now()
    code = resolve(name, args)
    code.check_agents(agents)
    made = code.create()
    return made, (*made.notes, *told(before, made.code, has_hook=made.hook is not None))


def resolve(name: str, args: Mapping[str, Any]) -> EnvironmentCode:
    """Find an environment and check its arguments. Raises InvalidInput."""
    target = _find(name)
    what = f"environment {name!r}"
    if not callable(target):
        raise InvalidInput(f"{what} is {type(target).__name__}; expected a function or a class")
    play = _play_of(target)
    if play is None:
        raise InvalidInput(f"{what} has no method `play(self, task, agent)`")
    _check_play(what, play, num_bound=1 if inspect.isclass(target) else 0)
    _check_hook(what, getattr(target, HOOK, None), play)
    if not callable(compared := getattr(target, COMPARISON, _find)):
        raise InvalidInput(
            f"{what}: its `{COMPARISON}` is {compared!r:.80}; expected a function of a task and its episodes"
        )
    _check_demonstrate(what, getattr(target, DEMONSTRATE, None))
    _check_args(what, target, args)
    return EnvironmentCode(name, target, dict(args))


def _play_of(target: Callable[..., Any]) -> Callable[..., Any] | None:
    """Return the function that plays an episode; None if the class has none."""
    return getattr(target, "play", None) if inspect.isclass(target) else target


def _find(name: str) -> object:
    path = BUILTINS.get(name, name)
    module_name, colon, attribute = path.partition(":")
    if not (colon and module_name and attribute):
        hint = nearest(name, BUILTINS)
        raise InvalidInput(
            f"environment {name!r} does not exist{hint}; builtin environments are {', '.join(BUILTINS)}; others are named module:attribute"
        )
    module = _import(name, module_name)
    found: object = module
    for part in attribute.split("."):
        if not hasattr(found, part):
            raise InvalidInput(f"environment {name!r}: {module_name} has no {part!r}{nearest(part, vars(found))}")
        found = getattr(found, part)
    return found


def _import(name: str, module_name: str) -> object:
    if module_name.partition(".")[0] in sys.stdlib_module_names:
        raise InvalidInput(f"environment {name!r}: {module_name} is a module of Python itself; rename yours")
    try:
        return importlib.import_module(module_name)
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and error.name and f"{module_name}.".startswith(f"{error.name}."):
            hint = f"; write {name.replace('.py:', ':')!r}" if ".py:" in name else ""
            raise InvalidInput(
                f"environment {name!r}: module {error.name!r} was not found beside the manifest or on PYTHONPATH{hint}"
            ) from None
        raise InvalidInput(
            f"environment {name!r}: importing {module_name} failed: {type(error).__name__}: {error}"
        ) from error


def _check_play(what: str, play: Callable[..., Any], num_bound: int) -> None:
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    given = [p for p in inspect.signature(play).parameters.values() if p.kind in kinds][num_bound:]
    if len(given) < _NUM_GIVEN:
        raise InvalidInput(f"{what}: `play` takes {len(given)} positional parameters; expected task and agent")
    if num_bound and any(p.default is inspect.Parameter.empty for p in given[_NUM_GIVEN:]):
        raise InvalidInput(f"{what}: `play` takes task and agent only; arguments of a class go to `__init__`")


def _check_hook(what: str, hook: object, play: Callable[..., Any]) -> None:
    if hook is not None and not callable(hook):
        raise InvalidInput(f"{what}: its `{HOOK}` is {hook!r:.80}; expected a function of a task")
    if inspect.iscoroutinefunction(hook) and not inspect.iscoroutinefunction(play):
        raise InvalidInput(f"{what}: its `{HOOK}` is `async def` and its `play` is not; make both or none `async def`")


def _check_demonstrate(what: str, demonstrate: object) -> None:
    if demonstrate is None or (callable(demonstrate) and not inspect.iscoroutinefunction(demonstrate)):
        return
    raise InvalidInput(f"{what}: its `{DEMONSTRATE}` is {demonstrate!r:.80}; expected a plain function of a task")


def _check_args(what: str, target: Callable[..., Any], args: Mapping[str, Any]) -> None:
    parameters = list(inspect.signature(target).parameters.values())
    if not inspect.isclass(target):
        parameters = parameters[_NUM_GIVEN:]
    named = {p.name: p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters)
    for key, value in args.items():
        if key in named:
            _check_type(f"{what}: argument {key!r}", value, _hints(target).get(key))
        elif not takes_any:
            known = f"it takes {', '.join(named)}" if named else "it takes no arguments"
            raise InvalidInput(f"{what} has no argument {key!r}{nearest(key, named)}; {known}")
    missing = [p.name for p in named.values() if p.default is p.empty and p.name not in args]
    if missing:
        raise InvalidInput(f"{what} needs the argument {missing[0]!r}")


def _check_type(what: str, value: object, expected: object) -> None:
    """Reject a plain value of another plain type. Other annotations are left to the environment."""
    if expected not in _SCALARS or (expected is float and type(value) is int):
        return
    if type(value) is not expected:
        raise InvalidInput(f"{what} is {value!r:.80}; expected {getattr(expected, '__name__', expected)}")


def _hints(target: Callable[..., Any]) -> dict[str, Any]:
    try:
        return get_type_hints(target.__init__ if inspect.isclass(target) else target)
    except Exception:  # annotations that cannot be read are not checked: they are the user's code
        return {}


def _takes_all(play: Callable[..., Any], *, has_self: bool) -> bool:
    """Whether the second parameter is `agents`. has_self: `self` is among the parameters."""
    return list(inspect.signature(play).parameters)[1 + has_self] == "agents"


def refuse_shadows(folder: Path) -> None:
    """Raise InvalidInput if a module in a folder that is searched first has the name of one of Python's, which it would replace."""
    found = {
        path.stem if path.suffix == ".py" else path.name: path.name for path in folder.glob("*") if _is_module(path)
    }
    for name in sorted(sys.stdlib_module_names & found.keys()):
        raise InvalidInput(
            f"{found[name]} in {folder} has the name of a module of Python itself, and libraries would import it instead; rename it"
        )


def _is_module(path: Path) -> bool:
    return path.suffix == ".py" or (path / "__init__.py").is_file()


def nearest(word: str, known: Iterable[str]) -> str:
    """Return `; did you mean 'x'?` with the nearest known word, or an empty text."""
    found = difflib.get_close_matches(word, list(known), n=1)
    return f"; did you mean {found[0]!r}?" if found else ""
