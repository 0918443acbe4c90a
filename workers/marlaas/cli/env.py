"""`marlaas env`: look at environments and try them by hand; a person or a script is the policy, nothing is trained."""

import contextlib
import inspect
import itertools
import json
import os
import re
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from threading import Lock
from typing import Annotated, Any, NoReturn

import typer
import yaml
from rich.console import Console
from rich.table import Table
from rich.text import Text

from marlaas.chat.conversations import conversation_line, speaker_name
from marlaas.cli.app import FAILED, complain
from marlaas.environment import Reply, Task, TurnLimit
from marlaas.environment_types import Play, TurnRequest, UnknownAgent
from marlaas.envs import BUILTINS
from marlaas.envs.leftovers import ProcessState, told
from marlaas.envs.loading import EnvironmentCode, refuse_shadows, resolve
from marlaas.envs.playing import UNSCORED, Outcome, explain, play_episode, score_group, seed_generators
from marlaas.envs.scripted import WrittenReplies
from marlaas.episode_state import ARBITRARY, EpisodeState
from marlaas_api.errors import InvalidInput
from marlaas_api.names import Split, derive_seed

MAX_TURNS = 8
_OF_TERMINAL = ("TERM", "COLORTERM", "COLUMNS", "LINES", "NO_COLOR", "TMPDIR")
_ENDINGS = {
    "completed": "completed",
    "max_turns": "turn limit reached: scored with the rewards so far",
    "tool_error": "a tool failed because of the policy: scored with the rewards so far",
}

app = typer.Typer(help=__doc__, rich_markup_mode="markdown")

Name = Annotated[str, typer.Argument(metavar="NAME", help="Name of a builtin environment, or module:attribute.")]
Args = Annotated[
    list[str] | None,
    typer.Option(
        "--args", "--arg", "-a", metavar="KEY=VALUE", help="Argument of the environment; the value is YAML. Repeatable."
    ),
]
SplitOption = Annotated[Split, typer.Option(help="Training tasks or held-out tasks.")]
Index = Annotated[int, typer.Option(min=0, help="Index of the task.")]
Seed = Annotated[int, typer.Option(min=0, help="The job's seed (training.seed); the same seed gives the same tasks.")]
Replies = Annotated[
    list[str] | None,
    typer.Option(
        "--reply",
        "-r",
        metavar="[AGENT=]TEXT",
        help="Next reply of AGENT; without AGENT=, of the next agent that is asked and has no replies of its own. Repeatable. "
        "Without --reply and --as, type all replies.",
    ),
]
PlayedAs = Annotated[
    list[str] | None,
    typer.Option(
        "--as",
        metavar="NAME",
        help="Name of an agent that you play at the keyboard; repeatable. The replies of all others come from --reply.",
    ),
]
Agents = Annotated[
    list[str] | None,
    typer.Option(
        "--agent",
        metavar="NAME",
        help="Name of an agent; repeatable. [default: those that the environment names, else policy]",
    ),
]
Socket = Annotated[
    Path,
    typer.Option(
        envvar="MARLAAS_ENVIRONMENT_SOCKET",
        metavar="PATH",
        help="Unix socket to listen on; the sandbox's pod sets the variable.",
    ),
]
MaxTurns = Annotated[int, typer.Option(min=1, help="Maximum turns of each agent, like rollout.maxTurns.")]


@app.command("list", epilog="Example: `marlaas env list`")
def list_() -> None:
    """Show the builtin environments and their arguments."""
    console = _console()
    for name, path in BUILTINS.items():
        module, _, attribute = path.partition(":")
        code = getattr(import_module(module), attribute)
        console.print(Text(name, style="bold"), Text(f"  {(inspect.getdoc(code) or '').splitlines()[0]}"))
        for parameter in inspect.signature(code).parameters.values():
            console.print(Text(f"    {_described(parameter)}", style="dim"))
    console.print(
        "\nName an environment of your own as [bold]module:attribute[/bold]: a function [bold]play(task, agent)[/bold] beside the manifest."
    )


@app.command("play", epilog="Example: `marlaas env play reverse --index 3`", no_args_is_help=True)
def play(
    name: Name,
    args: Args = None,
    split: SplitOption = Split.TRAIN,
    index: Index = 0,
    seed: Seed = 0,
    reply: Replies = None,
    played_as: PlayedAs = None,
    agent: Agents = None,
    max_turns: MaxTurns = MAX_TURNS,
) -> None:
    """Play one episode by hand: read the environment's messages, reply, and see the reward.

    Replies are taken from --reply, else from the keyboard, one per line (Ctrl-D ends the episode). Parts that run at the same time in a job
    (`together`) are played one after another here, so the same replies give the same episode. Modules are searched in the current folder and on
    PYTHONPATH.

    Exit code: 0 played, 1 the environment raised an exception, 2 the name or an argument is invalid.
    """
    if ":" in name:
        refuse_shadows(Path.cwd())
    sys.path.insert(0, os.getcwd())  # noqa: PTH109  # what Python itself would put there
    arguments = parsed_args(args or [])
    console = _console()
    before = ProcessState.now()
    with _variables_of_a_job() as dropped:
        code = resolve(name, arguments)
        names = agent or list(code.needed_agents()) or ["policy"]
        code.check_agents(names)
        channel = _TerminalChannel(console, _AgentReplies(names, reply, played_as, _typed(console)), max_turns)
        task = Task(split, index, derive_seed(seed, split.value, index))
        state = EpisodeState(names, channel, in_order=True)
        outcome = _played(code, task, state, dropped, before)
    _show(console, outcome, channel.num_turns)
    if state.is_spoken_apart:
        complain(
            f"An agent was spoken to in a thread that the episode does not know. A job with maxStaleness 0 refuses this: {ARBITRARY}."
        )


def _played(
    code: EnvironmentCode, task: Task, state: EpisodeState, dropped: Collection[str], before: ProcessState
) -> Outcome:
    """Play the episode, and say what loading left behind. Exits if the environment raises an exception.

    Args:
        dropped: variables that it does not find.
        before: of this process, before the environment was imported.
    """
    try:
        environment = code.create()
    except UnknownAgent:
        raise
    except (Exception, SystemExit) as error:
        _complain_of(error, dropped)
    for note in environment.notes:
        complain(f"note: {note}.")
    for sentence in told(before, environment.code, has_hook=environment.hook is not None):
        complain(f"{sentence}.")
    seed_generators(task)
    try:
        outcome = play_episode(environment, task, state)
        if environment.compares and outcome.is_scored:
            play = Play(outcome.rewards, outcome.metrics, json.loads(outcome.data))
            ((rewards, metrics),) = score_group(environment, task, [play])
            outcome = replace(outcome, rewards=rewards, metrics=metrics)
        return outcome
    except UnknownAgent:
        raise
    except (Exception, SystemExit) as error:
        _complain_of(error, dropped)


def _complain_of(error: BaseException, dropped: Collection[str]) -> NoReturn:
    complain(explain(error))
    complain_of_variables(dropped, explain(error))
    complain(
        "The environment raised an exception. In a job this is a fault: the episode is played again and not scored."
    )
    raise typer.Exit(FAILED) from None


@app.command("serve", epilog="Example: `marlaas env serve my_environment:play`", no_args_is_help=True)
def serve(name: Name, socket: Socket) -> None:
    """Serve an environment to a sandbox's supervisor: the command of an environment image (environment.entrypoint).

    The arguments are environment.args of the job. Modules are searched in the working folder and on PYTHONPATH.

    Exit code: 0 stopped on request, 2 the socket cannot be created.
    """
    from marlaas_worker.sandbox import environment_server

    environment_server.settle_variables()
    sys.path.insert(0, os.getcwd())  # noqa: PTH109  # what Python itself would put there
    environment_server.serve(name, socket)


@contextlib.contextmanager
def _variables_of_a_job() -> Iterator[frozenset[str]]:
    """Give this process the variables that an environment finds in a job, and those of the terminal; yield the names of the others."""
    from marlaas_worker.sandbox.seclusion import clean_variables, given_variables

    own = dict(os.environ)
    kept = {name: own[name] for name in _OF_TERMINAL if name in own}
    os.environ.clear()
    os.environ.update({**kept, **clean_variables(own), **given_variables(own)})
    try:
        yield frozenset(name for name in own if name not in os.environ)
    finally:
        os.environ.clear()
        os.environ.update(own)


def complain_of_variables(dropped: Collection[str], text: str) -> None:
    """Say how to pass a variable that an error's text names, and that environments do not find."""
    for name in sorted(set(re.findall(r"\w+", text)).intersection(dropped)):
        complain(
            f"{name} of your shell does not reach an environment, here and in a job; set MARLAAS_ENVIRONMENT_{name} instead"
        )


def parsed_args(given: Iterable[str]) -> dict[str, Any]:
    """Parse arguments of the form `key=value`; values are YAML. Raises InvalidInput."""
    parsed: dict[str, Any] = {}
    for word in given:
        key, equals, value = word.partition("=")
        if not (key and equals):
            raise InvalidInput(f"--args {word!r}: expected KEY=VALUE, for example --args max_length=4")
        try:
            parsed[key] = yaml.safe_load(value)
        except yaml.YAMLError as error:
            raise InvalidInput(f"--args {word!r}: the value is not YAML: {' '.join(str(error).split())}") from error
    return parsed


class _AgentReplies:
    """Replies of a script and of a person, by agent.

    Args:
        given: texts, each for the agent that it begins with (`NAME=`), or for all agents without such texts; None: a person plays
            all agents.
        typed_for: agents that a person plays.
        typed: the person's replies.
    """

    def __init__(
        self, names: Sequence[str], given: Sequence[str] | None, typed_for: Sequence[str] | None, typed: Iterator[str]
    ) -> None:
        own: dict[str, list[str]] = {}
        others: list[str] = []
        for text in given or ():
            name, equals, reply = text.partition("=")
            own.setdefault(name, []).append(reply) if equals and name in names else others.append(text)
        if strangers := [name for name in typed_for or () if name not in names or name in own]:
            why = "has replies of --reply" if strangers[0] in own else f"is none of the agents {', '.join(names)}"
            raise InvalidInput(f"--as {strangers[0]}: this agent {why}")
        is_typed = not given and not typed_for
        script = iter(others)
        self.names = tuple(names)
        self._sources = {name: iter(own[name]) if name in own else typed if is_typed else script for name in names}
        self._sources |= dict.fromkeys(typed_for or (), typed)

    def next(self, agent: str) -> str:
        """Return the agent's next reply. Raises TurnLimit if there is none."""
        text = next(self._sources[agent], None)
        if text is None:
            raise TurnLimit(f"no replies are left for agent {agent!r}")
        return text


class _TerminalChannel:
    """Channel of a person or a script: displays messages and returns the replies."""

    def __init__(self, console: Console, replies: _AgentReplies, max_turns: int) -> None:
        self.num_turns = 0
        self._console = console
        self._replies = replies
        self._max_turns = max_turns
        self._one_at_a_time = Lock()
        self._written = WrittenReplies()

    def turn(self, request: TurnRequest) -> Reply:
        """Display the request and return the agent's next reply. Raises TurnLimit."""
        with self._one_at_a_time:  # clients of chat completions ask in threads
            return self._turn(request)

    def _turn(self, request: TurnRequest) -> Reply:
        if len(self._replies.names) > 1:
            self._console.print(Text(f"({request.agent} is asked)", style="dim"))
        self._show(request)
        if request.num_before >= self._max_turns:
            raise TurnLimit(f"agent {request.agent!r} has used all of its {self._max_turns} turns (--max-turns)")
        text = self._replies.next(request.agent)
        self.num_turns += 1
        self._say(request.agent, text, "assistant")
        return self._written.reply(request, text)

    def may_call(self, agents: Sequence[str]) -> None:
        """Do nothing: a call of another agent is an error that names it."""

    def tool(self, is_open: bool, rewards: Mapping[str, float]) -> None:
        """Display that a tool runs."""
        if is_open:
            self._console.print(Text("(a tool runs)", style="dim"))

    def _show(self, request: TurnRequest) -> None:
        if isinstance(request.append, str):
            self._say("raw text", request.append, "raw text")
            return
        for message in request.append:
            self._say(speaker_name(message.role, message.name), message.content, message.role)

    def _say(self, who: str, text: str, role: str) -> None:
        self._console.print(conversation_line(who, text, role), soft_wrap=True)


def _typed(console: Console) -> Iterator[str]:
    """Yield lines from the keyboard or from a pipe until end of file."""
    for _ in itertools.count():
        try:
            yield console.input("[dim]your reply> [/dim]") if sys.stdin.isatty() else input()
        except EOFError:
            return


def _show(console: Console, outcome: Outcome, num_turns: int) -> None:
    table = Table.grid(padding=(0, 2))
    table.add_row("ending", _ENDINGS[outcome.ending])
    for agent, reward in outcome.rewards.items():
        text = f"{reward:g}" if outcome.is_scored else "unscored"
        table.add_row(f"reward of {agent}", Text(text, style="bold"))
    for number, rewards in outcome.choices.items():
        table.add_row(f"rewards of choice {number + 1}", ", ".join(f"{reward:g}" for reward in rewards))
    for name, value in outcome.metrics.items():
        table.add_row(name, f"{value:g}")
    table.add_row("turns", str(num_turns))
    table.add_row("seconds in tools", f"{outcome.tool_s:.2f}")
    console.print()
    console.print(table)
    if outcome.tool_error:
        console.print(Text(f"tool error: {outcome.tool_error}", style="dim"))
    if not outcome.is_scored:
        complain(UNSCORED)


def _described(parameter: inspect.Parameter) -> str:
    kind = getattr(parameter.annotation, "__name__", None)
    kind = kind if kind and not getattr(parameter.annotation, "__args__", None) else str(parameter.annotation)
    default = "required" if parameter.default is parameter.empty else f"default {parameter.default!r}"
    return f"{parameter.name}: {kind}, {default}"


def _console() -> Console:
    return Console(highlight=False)
