"""Display an episode in a terminal, or as JSON. Pure.

Control characters in a model's text are escaped, so that the terminal does not act on them.
"""

import json
from collections.abc import Iterator, Mapping

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.text import Text

from marlaas.chat.conversations import conversation_line, speaker_name
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


def rich(one: Played, *, tokens: bool = False) -> RenderableType:
    """Return an episode for a terminal or plain text. `tokens` adds the token ids below each reply."""
    rewards = _candidate_rewards(one.record)
    lines = [line for turn in one.record.turns for line in _turn(turn, tokens, rewards.get((turn.agent, turn.turn)))]
    return Group(
        Text(_heading(one), style="bold"), Padding(Group(*lines), (0, 0, 0, 2)), Padding(_verdict(one), (0, 0, 0, 2))
    )


def as_json(one: Played) -> str:
    """Return one JSON line: the episode as stored, with its job, step, advantages and group's rewards."""
    around = {
        "job": one.job,
        "step": one.step,
        "advantages": dict(one.advantages),
        "group_rewards": {agent: list(rewards) for agent, rewards in one.group_rewards.items()},
    }
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
    if not record.versions:
        return "no turn"
    return f"version{'s' if len(record.versions) > 1 else ''} {', '.join(map(str, record.versions))}"


def _time(record: EpisodeRecord) -> str:
    tools = f", {record.tool_s:.1f} s of it in tools" if record.tool_s >= 0.05 else ""
    return f"{record.duration_s:.1f} s{tools}"


def _candidate_rewards(record: EpisodeRecord) -> dict[tuple[str, int], float]:
    """Return the rewards of candidates by agent and turn."""
    pairs = ((choice.agent, zip(choice.turns, choice.rewards, strict=False)) for choice in record.choices)
    return {(agent, turn): reward for agent, rewarded in pairs for turn, reward in rewarded}


def _turn(turn: TurnRecord, tokens: bool, reward: float | None) -> Iterator[Text]:
    if isinstance(turn.append, str):
        yield conversation_line("raw text", turn.append, "raw text")
    else:
        for message in turn.append:
            yield conversation_line(speaker_name(message.role, message.name), message.content, message.role)
    if not turn.opens_segment or turn.parent is None:
        reply = conversation_line(turn.agent, turn.text or "(nothing)", "assistant")
    else:
        reply = conversation_line(
            f"{turn.agent} (new segment: the chat template changed earlier text)", turn.text, "assistant"
        )
    candidate = "" if reward is None else f", candidate with reward {reward:g}"
    yield reply.append(f"  [{turn.stop_reason}, {len(turn.output_ids)} tokens{candidate}]", style="dim")
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
