"""The command: its tree of subcommands, of which only the requested one is imported, and errors as sentences and exit codes."""

import contextlib
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import version
from typing import Annotated

import typer

from marlaas.cli.standard_files import open_closed_descriptors
from marlaas_api.errors import InvalidInput, MarlaasError

HELP = """Reinforcement learning of LLMs for many tenants at once.

A **ModelPool** serves a base model, an **RLJob** trains an adapter of it in an environment, and a **Tenant** sets the share and quota of namespaces.
They are YAML objects, the same for a cluster (`kubectl apply`) and for this machine (`marlaas run`)."""

EPILOG = """Getting started:

- `marlaas run examples/quickstart.yaml` trains two jobs on one tiny model, in minutes.
- `marlaas init FOLDER` creates a starter project.
- `marlaas episodes DIR`, `marlaas plot DIR` and `marlaas chat DIR` show the episodes, curves and adapter of a run; `marlaas usage DIR` what it used.
- `marlaas env play reverse` plays an environment by hand, with you as the policy.
- `marlaas validate FILE` checks a manifest before anything starts.
- `marlaas submit FILE` applies it to a cluster; `watch`, `why`, `suspend` and `resume` manage the job there (also as `kubectl marlaas …`).
- With `--run DIR`, `submit`, `suspend`, `resume` and `cancel` change a `marlaas run` while it goes on."""


@dataclass(frozen=True, slots=True)
class Command:
    """One command of `marlaas`.

    `attribute` names a function, or a Typer application with subcommands (`is_group`). `is_whole`: the command runs
    without arguments.
    """

    summary: str
    module: str
    attribute: str
    example: str
    is_group: bool = False
    is_whole: bool = False


COMMANDS = {
    "init": Command(
        "Create a starter project: environment, test and manifest.",
        "marlaas.cli.init",
        "init",
        "marlaas init word-game",
    ),
    "run": Command(
        "Train the jobs of manifests on this machine.",
        "marlaas.cli.run",
        "run",
        "marlaas run examples/quickstart.yaml --out runs/first",
    ),
    "eval": Command(
        "Evaluate base models and adapters without training.",
        "marlaas.cli.eval",
        "evaluate",
        "marlaas eval examples/quickstart.yaml --adapter runs/first/team-a/reverse/adapter",
    ),
    "validate": Command(
        "Check manifests, and report errors by file, line and field.",
        "marlaas.cli.validate",
        "validate",
        "marlaas validate examples/*.yaml",
    ),
    "data": Command(
        "Show the data set of a job: prompts, tokens, truths, rewards.",
        "marlaas.cli.data",
        "app",
        "marlaas data show examples/word-problems.yaml",
        is_group=True,
    ),
    "episodes": Command(
        "Show recorded episodes: turns, tool calls, rewards, faults.",
        "marlaas.cli.output",
        "episodes",
        "marlaas episodes runs/first --worst --step 3",
    ),
    "chat": Command(
        "Chat with the base model and the trained adapter side by side.",
        "marlaas.cli.chat",
        "chat",
        "marlaas chat runs/first --prompt 'What is 3 + 4?'",
    ),
    "plot": Command(
        "Plot one or several runs in one figure.",
        "marlaas.cli.output",
        "plot",
        "marlaas plot runs/first runs/second --out both.html",
    ),
    "push": Command(
        "Upload an adapter to the Hugging Face hub, with a model card.",
        "marlaas.cli.push",
        "push",
        "marlaas push runs/first --job reverse OWNER/reverse-lora",
    ),
    "usage": Command(
        "Show the tokens, seconds and bytes that jobs and tenants used.",
        "marlaas.cli.usage",
        "usage",
        "marlaas usage runs/first --csv",
        is_whole=True,
    ),
    "models": Command(
        "Show and prepare the builtin base models.", "marlaas.cli.models", "app", "marlaas models list", is_group=True
    ),
    "submit": Command(
        "Check manifests and apply them to a cluster.",
        "marlaas.cli.cluster",
        "submit",
        "marlaas submit examples/quickstart.yaml --watch",
    ),
    "watch": Command(
        "Show the status of jobs in the cluster until they end.",
        "marlaas.cli.cluster",
        "watch",
        "marlaas watch reverse -n team-a",
        is_whole=True,
    ),
    "why": Command(
        "Explain the state of a job in a cluster or a run, and what to do.",
        "marlaas.cli.cluster",
        "why",
        "marlaas why reverse -n team-a",
    ),
    "adapter": Command(
        "Fetch a job's adapter out of the cluster.",
        "marlaas.cli.cluster",
        "adapter",
        "marlaas adapter reverse -n team-a --out reverse-adapter",
    ),
    "suspend": Command(
        "Suspend a job in the cluster; it keeps its last version.",
        "marlaas.cli.cluster",
        "suspend",
        "marlaas suspend reverse -n team-a",
    ),
    "resume": Command(
        "Resume a suspended job in the cluster.",
        "marlaas.cli.cluster",
        "resume",
        "marlaas resume reverse -n team-a",
    ),
    "cancel": Command(
        "Cancel a job of a run on this machine.",
        "marlaas.cli.cluster",
        "cancel",
        "marlaas cancel reverse --run runs/first",
    ),
    "env": Command(
        "Play an environment by hand, without training.",
        "marlaas.cli.env",
        "app",
        "marlaas env play reverse",
        is_group=True,
    ),
}


EVAL_ON_A_CLUSTER = Command(
    "Evaluate base models and adapters on a cluster, without training.",
    "marlaas.cli.cluster_eval",
    "evaluate",
    "kubectl marlaas eval examples/cluster/rljob.yaml",
)
"""The command `eval` of the kubectl plugin; that of `marlaas` evaluates on this machine."""


def main() -> None:
    """Run the command in `sys.argv` and exit."""
    _run("marlaas")


def plugin() -> None:
    """Run as a kubectl plugin: kubectl runs `kubectl-marlaas` for `kubectl marlaas`."""
    _run("kubectl marlaas", {**COMMANDS, "eval": EVAL_ON_A_CLUSTER})


def _run(called: str, commands: Mapping[str, Command] = COMMANDS) -> None:
    open_closed_descriptors()
    try:
        build(sys.argv[1:], commands)(prog_name=called)
    except KeyboardInterrupt:  # while modules load; commands handle it themselves
        sys.exit(INTERRUPTED)
    except Exception as error:
        code = exit_code_of(error)
        if code is None:
            raise
        sys.exit(code)


def build(arguments: Sequence[str], commands: Mapping[str, Command] = COMMANDS) -> typer.Typer:
    """Return the tree of commands for these arguments. Commands that were not requested have only a name and a summary."""
    asked = next((argument for argument in arguments if not argument.startswith("-")), None)
    app = typer.Typer(
        help=HELP,
        epilog=EPILOG,
        rich_markup_mode="markdown",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(_root)
    for name, command in commands.items():
        _mount(app, name, command, is_asked=name == asked)
    return app


def _mount(app: typer.Typer, name: str, command: Command, is_asked: bool) -> None:
    epilog = f"Example: `{command.example}`"
    if not is_asked:
        app.command(name, help=command.summary, epilog=epilog)(_not_requested)
        return
    target = getattr(import_module(command.module), command.attribute)
    if command.is_group:
        app.add_typer(target, name=name, help=command.summary, epilog=epilog, no_args_is_help=True)
    else:
        app.command(name, epilog=epilog, no_args_is_help=not command.is_whole)(target)


def _not_requested() -> None:
    """Placeholder for a command that was not requested."""


def _version(is_asked: bool) -> None:
    if is_asked:
        typer.echo(f"marlaas {version('marlaas')}")
        raise typer.Exit


def _root(
    _: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Handle the options that stand before the command."""


FAILED, INVALID, INTERRUPTED = 1, 2, 130


def exit_code_of(error: Exception) -> int | None:
    """Print the error for the user and return the exit code; None, without output, for an unexpected error."""
    if isinstance(error, BrokenPipeError):
        _close_output()
        return FAILED
    if isinstance(error, MarlaasError):
        complain(str(error))
        return INVALID if isinstance(error, InvalidInput) else FAILED
    if isinstance(error, OSError) and error.strerror:
        complain(f"{error.filename}: {error.strerror}" if error.filename else error.strerror)
        return FAILED
    return None


def complain(text: str) -> None:
    """Write to standard error, without Rich, so that paths and lines are not wrapped. Without a reader the text is dropped."""
    with contextlib.suppress(OSError):
        sys.stderr.write(f"{text}\n")
        sys.stderr.flush()


def _close_output() -> None:
    """Redirect standard output to the null device, so that Python's flush at exit does not fail on the closed pipe."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
