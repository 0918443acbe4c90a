"""`marlaas chat`: chat with the base model and the trained adapter side by side."""

import json
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from marlaas.chat.conversations import Chat, ChatSampling, Columns, Side
from marlaas.chat.speakers import ModelSpeaker
from marlaas.local.preparation import describe
from marlaas.local.records import OpenedJob, open_job
from marlaas_api.errors import InvalidInput
from marlaas_api.messages.agent_settings import AgentSettings
from marlaas_api.numeric import LARGEST_INTEGER

Dir = Annotated[Path, typer.Argument(metavar="DIR", help="Output folder of `marlaas run`, or a job's folder in it.")]
Job = Annotated[str | None, typer.Option(metavar="NAME", help="Name of the job, if there are several.")]
Agent = Annotated[str | None, typer.Option(metavar="NAME", help="Name of the agent, if the job has several.")]
Prompts = Annotated[
    list[str] | None,
    typer.Option(
        "--prompt", "-p", metavar="TEXT", help="Send this message and exit; repeat it to continue the conversation."
    ),
]
Greedy = Annotated[bool, typer.Option("--greedy", help="Choose the most probable token instead of sampling.")]
Temperature = Annotated[
    float | None, typer.Option(min=0.01, max=2.0, help="Sampling temperature. [default: the job's]")
]
MaxTokens = Annotated[
    int | None, typer.Option(min=1, metavar="N", help="Maximum tokens of a reply. [default: the job's]")
]
Seed = Annotated[
    int, typer.Option(min=0, max=LARGEST_INTEGER, help="Sampling seed, the same for both models and for every reply.")
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object per prompt.")]


def chat(
    folder: Dir,
    job: Job = None,
    agent: Agent = None,
    prompt: Prompts = None,
    greedy: Greedy = False,
    temperature: Temperature = None,
    max_tokens: MaxTokens = None,
    seed: Seed = 0,
    as_json: Json = False,
) -> None:
    """Chat with the base model and the trained adapter, with their replies side by side.

    Each message goes to both models, and each model continues its own conversation. `/new` starts new conversations, Ctrl-D exits. With --prompt,
    or with lines from a pipe, the command answers those and exits. Tokens are sampled as in training: at the job's temperature, from the whole vocabulary.

    Exit code: 0 success, 2 the folder, job or adapter does not exist.
    """
    if greedy and temperature is not None:
        raise InvalidInput("--greedy and --temperature exclude each other: choose one")
    opened = open_job(folder, job)
    rollout = opened.document.spec.rollout
    heat = None if greedy else temperature or rollout.temperature
    chosen = _agent(opened, agent)
    pool = opened.pool_of(chosen)
    template = rollout.chat_template.over(pool.spec.chat_template)
    speaker = ModelSpeaker(Path(pool.model_path), _adapter(opened, chosen.name), template)
    conversation = Chat(speaker, ChatSampling(max_tokens or rollout.max_tokens, heat, seed))
    console = Console(highlight=False)
    titles = {Side.BASE: describe(pool.spec.model), Side.ADAPTER: f"{opened.name}, trained"}
    for text in _prompts(console, prompt):
        if text == "/new":
            conversation.begin()
        elif as_json:
            replies = {side.value: reply for side, reply in conversation.ask(text, lambda side, piece: None)}
            typer.echo(json.dumps({"prompt": text, **replies}, ensure_ascii=False))
        else:
            _answer(console, conversation, text, titles)


def _answer(console: Console, conversation: Chat, text: str, titles: dict[Side, str]) -> None:
    if not sys.stdin.isatty():
        console.print(f"\nyou: {text}", markup=False, style="bold cyan")
    with Columns(console, titles) as columns:
        for _ in conversation.ask(text, columns.append):
            pass


def _prompts(console: Console, given: Iterable[str] | None) -> Iterator[str]:
    """Yield the prompts: from the option, from the lines of a pipe, or from the keyboard. Skip blank lines."""
    if given is not None:
        yield from given
    elif not sys.stdin.isatty():
        yield from (line.strip() for line in sys.stdin if line.strip())
    else:
        yield from _typed(console)


def _typed(console: Console) -> Iterator[str]:
    while True:
        try:
            text = console.input("\n[bold cyan]you> [/bold cyan]").strip()
        except (EOFError, KeyboardInterrupt):
            return
        if text:
            yield text


def _agent(opened: OpenedJob, agent: str | None) -> AgentSettings:
    """Return the agent of this name; None: the only one. Raises InvalidInput."""
    played = {one.name: one.policy_name for one in opened.document.spec.agents}
    names = list(dict.fromkeys(played.values()))
    agent = played.get(agent, agent) if agent is not None else None
    if agent is not None and agent not in names:
        raise InvalidInput(f"{opened.name} has no agent {agent}: its agents are {', '.join(names)}")
    if agent is None and len(names) > 1:
        raise InvalidInput(f"{opened.name} has several agents: choose one with --agent {' or --agent '.join(names)}")
    return next(one for one in opened.document.spec.policies if agent in (None, one.name))


def _adapter(opened: OpenedJob, agent: str) -> Path:
    """Return the folder with the agent's adapter. Raises InvalidInput."""
    folder = opened.adapter_of(agent)
    if not (folder / "adapter_config.json").is_file():
        raise InvalidInput(
            f"{opened.name} has no adapter in {folder} yet: `marlaas run` writes it when the job ends, or Ctrl-C stops the run"
        )
    return folder
