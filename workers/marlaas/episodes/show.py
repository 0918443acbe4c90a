"""Display an episode in a terminal, or as JSON. Pure.

Control characters in a model's text are escaped, so that the terminal does not act on them.
"""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.text import Text

from marlaas.chat.conversations import ROLE_STYLES, conversation_line, speaker_name
from marlaas.episodes.prompts import PromptTexts
from marlaas.episodes.record import EpisodeRecord, TurnRecord
from marlaas.episodes.selection import Played
from marlaas_api.last_words import visible
from marlaas_api.messages import Ending
from marlaas_api.names import Split

_ENDINGS = {
    Ending.MAX_TURNS: "out of turns",
    Ending.MAX_TOKENS: "out of tokens",
    Ending.TOOL_ERROR: "tool error of the policy",
}


def rich(one: Played, *, tokens: bool = False, prompts: PromptTexts | None = None) -> RenderableType:
    """Return an episode for a terminal or plain text.

    Args:
        tokens: add the token ids below each reply.
        prompts: show prompts as the model read them, instead of the environment's messages.
    """
    earned = _candidates(one)
    lines: list[Text] = []
    for turn in one.record.turns:
        if prompts is None:
            lines += _appended(turn)
        else:
            lines.append(conversation_line("prompt", prompts.text(one.job, turn.agent, turn.prompt_ids), "raw text"))
        lines += _replied(turn, tokens, earned.get((turn.agent, turn.turn), ""))
    return Group(
        Text(_heading(one), style="bold"), Padding(Group(*lines), (0, 0, 0, 2)), Padding(_verdict(one), (0, 0, 0, 2))
    )


def as_json(one: Played, prompts: PromptTexts | None = None) -> str:
    """Return one JSON line: the episode as stored, with its job, step, advantages and group's rewards, and the texts of `prompts`."""
    around: dict[str, Any] = {
        "job": one.job,
        "step": one.step,
        "advantages": dict(one.advantages),
        "candidate_advantages": [
            {"agent": agent, "turn": turn, "advantage": value} for (agent, turn), value in one.candidates.items()
        ],
        "group_rewards": {agent: list(rewards) for agent, rewards in one.group_rewards.items()},
    }
    if prompts is not None:
        around["prompt_texts"] = [prompts.text(one.job, turn.agent, turn.prompt_ids) for turn in one.record.turns]
    return json.dumps({**around, **one.record.model_dump(mode="json")}, ensure_ascii=False)


def _heading(one: Played) -> str:
    record = one.record
    parts = [one.job, _place(one), f"task {record.index}", f"member {record.member}", _version(record)]
    return " · ".join([*(part for part in parts if part), _time(record)])


def _place(one: Played) -> str:
    if one.record.split is Split.EVAL:
        return "held out"
    return "step not finished" if one.step is None else f"step {one.step}"


def _version(record: EpisodeRecord) -> str:
    found = record.versions
    if not found:
        return "no turn"
    if len(record.rewards.keys() | found.keys()) > 1:
        return f"version{'s' if len(found) > 1 else ''} {', '.join(f'{agent} {version}' for agent, version in found.items())}"
    return f"version {next(iter(found.values()))}"


def _time(record: EpisodeRecord) -> str:
    tools = f", {record.tool_s:.1f} s of it in tools" if record.tool_s >= 0.05 else ""
    return f"{record.duration_s:.1f} s{tools}"


def _candidates(one: Played) -> dict[tuple[str, int], str]:
    """Return the reward and advantage of each candidate by agent and turn."""
    found: dict[tuple[str, int], str] = {}
    for choice in one.record.choices:
        for turn, reward in zip(choice.turns, choice.rewards, strict=False):
            advantage = one.candidates.get((choice.agent, turn))
            standing = "" if advantage is None else f", advantage {advantage:+.2f}"
            found[choice.agent, turn] = f", candidate with reward {reward:g}{standing}"
    return found


def _appended(turn: TurnRecord) -> Iterator[Text]:
    if isinstance(turn.append, str):
        yield conversation_line("raw text", turn.append, "raw text")
        return
    continues = turn.append and turn.append[-1].role == "assistant"
    for message in turn.append[:-1] if continues else turn.append:
        yield conversation_line(speaker_name(message.role, message.name), message.content, message.role)


def _replied(turn: TurnRecord, tokens: bool, candidate: str) -> Iterator[Text]:
    is_new = turn.opens_segment and turn.parent is not None
    speaker = f"{turn.agent} (new segment: the chat template changed earlier text)" if is_new else turn.agent
    reply = conversation_line(speaker, "", "assistant").append(visible(turn.opening), style="dim")
    reply.append(visible(turn.text) or ("" if is_new else "(nothing)"), style=ROLE_STYLES["assistant"])
    yield reply.append(f"  [{turn.stop_reason}, {len(turn.output_ids)} tokens{candidate}]", style="dim")
    for call in turn.parts.tool_calls if turn.parts is not None else ():
        yield Text(f"call {visible(call.name)} {visible(call.arguments)}", style="dim")
    if tokens:
        yield Text(f"ids {' '.join(map(str, turn.output_ids))}", style="dim")


def _verdict(one: Played) -> Text:
    record = one.record
    if record.fault is not None:
        return Text(f"fault: {record.fault} (not scored)\n{visible(record.fault_text)}", style="red")
    text = Text()
    for agent, reward in record.rewards.items():
        text.append(f"reward{_of(agent, record.rewards)} {reward:g}", style="bold")
        text.append(_standing(one, agent), style="dim")
    extras = [_ENDINGS[record.ending]] if record.ending in _ENDINGS else []
    extras += [visible(record.tool_error)] if record.tool_error else []
    extras += [f"{visible(name)} {value:g}" for name, value in record.metrics.items()]
    extras += [f"played again after {' and '.join(record.prior_faults)}"] if record.prior_faults else []
    return text.append(f"{' · '.join(extras)}\n", style="dim")


def _of(agent: str, rewards: Mapping[str, float]) -> str:
    return f" of {agent}" if len(rewards) > 1 else ""


def _standing(one: Played, agent: str) -> str:
    """Return the agent's advantage and the rewards of its group."""
    group = one.group_rewards.get(agent, ())
    advantage = f"  advantage {one.advantages[agent]:+.2f}" if agent in one.advantages else ""
    rewards = f"  group {' '.join(f'{reward:g}' for reward in group)}" if len(group) > 1 else ""
    return f"{advantage}{rewards}\n"
