"""What is worth knowing of a data set before a job trains on it: counts, repeated prompts, long prompts, and the rewards of known replies."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from marlaas.environment import Message, Reply, Score, Split
from marlaas.envs.dataset.environment import Dataset
from marlaas.envs.dataset.rewards import CERTAIN, MATH_TIMEOUT, Rewards
from marlaas.envs.dataset.tasks import Part, TaskRow, Tasks

NUM_LONGEST = 20
"""Prompts, the longest by characters, whose tokens are counted."""
_FORMS = ("{}", "\\boxed{{{}}}", "<answer>{}</answer>", "```python\n{}\n```")
"""Ways to write the truth as a reply; the one with the most reward counts."""

Count = Callable[[Sequence[Mapping[str, str]]], int]


class Trained(Protocol):
    """A demonstrated reply as it is trained: its text with the end token, and its number of tokens. problem: why it cannot be."""

    @property
    def text(self) -> str: ...
    @property
    def num_tokens(self) -> int: ...
    @property
    def problem(self) -> str: ...


Demonstrated = Callable[[Sequence[Message]], Sequence[Trained]]


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits in tokens: of the whole conversation (`maxModelLen` of the pool; None: not known), and of a reply."""

    conversation: int | None
    reply: int


@dataclass(frozen=True, slots=True)
class ShownTask:
    """One task. tokens: of its prompt; None: not known. of_truth: the score of the truth as a reply; None: there is no truth.

    of_empty: the score of an empty reply; None: there are no rewards. trained: its demonstrated replies, if their tokens are known.
    is_partial: parts of the reward are known in the job only.
    """

    index: int
    task: TaskRow
    tokens: int | None
    of_truth: Score | None
    of_empty: Score | None
    trained: Sequence[Trained] = ()
    is_partial: bool = False


@dataclass(frozen=True, slots=True)
class PartFacts:
    """Facts of a split. longest: place and tokens of the longest prompt, if they are known."""

    num_rows: int
    num_repeated: int
    longest: tuple[str, int] | None


def part_facts(part: Part, count: Count | None) -> PartFacts:
    """Return the facts of a split."""
    longest = max(_longest(part, count), key=lambda one: one[1], default=None) if count is not None else None
    return PartFacts(len(part), part.num_repeated(), longest)


def _longest(part: Part, count: Count) -> Iterator[tuple[str, int]]:
    lengths = part.rows.lengths()[part.numbers]
    num = min(NUM_LONGEST, len(lengths))
    for at in np.argpartition(lengths, len(lengths) - num)[-num:] if num else ():
        task = part.task(int(at))
        yield task.place, count(_messages(task))


def shown(
    data: Dataset, split: Split, num: int, count: Count | None, trained: Demonstrated | None = None
) -> Iterator[ShownTask]:
    """Yield the first tasks of a split. trained: returns the demonstrated replies of a conversation. Raises what the rewards raise."""
    part = data.tasks.part(split)
    for index in range(min(num, len(part))):
        task = part.task(index)
        tokens = count(_messages(task)) if count is not None else None
        conversation = task.rendered.conversation
        given = trained(conversation) if trained is not None and conversation else ()
        if data.rewards is None:
            yield ShownTask(index, task, tokens, None, None, given)
            continue
        empty = data.rewards.score(Reply(""), task)
        is_partial = bool(data.rewards.left_out)
        yield ShownTask(index, task, tokens, _of_truth(data.rewards, task), empty, given, is_partial)


def _messages(task: TaskRow) -> list[dict[str, str]]:
    return [{"role": one.role, "content": one.content} for one in task.rendered.prompt]


def _of_truth(rewards: Rewards, task: TaskRow) -> Score | None:
    truth = task.rendered.truth
    if not truth:
        return None
    scores = []
    for form in _FORMS:
        scores.append(one := rewards.score(Reply(form.format(truth), num_tokens=1), task))
        if _is_certain(one):
            break  # no form earns more, and a comparison of mathematics may take a second
    return max(scores, key=lambda one: (_num_certain(one), float(one.reward)))  # type: ignore[arg-type]


def _is_certain(score: Score) -> bool:
    """Return whether the reward has no other parts than certain ones, and the reply is right by all of them."""
    parts = [name for name in score.metrics if name not in (*CERTAIN, MATH_TIMEOUT)]
    return not parts and bool(_num_certain(score)) and all(score.metrics.get(name, 1) == 1 for name in CERTAIN)


def _num_certain(score: Score) -> int:
    return sum(score.metrics.get(name) == 1 for name in CERTAIN)


def warnings(tasks: Tasks, facts: Mapping[Split, PartFacts], limits: Limits, num_tasks: int | None) -> Iterator[str]:
    """Yield sentences on a data set as a whole. num_tasks: `training.data.tasks` of the job."""
    for split, one in facts.items():
        if one.num_repeated:
            yield f"{one.num_repeated} of {one.num_rows} {_name(split)} rows repeat the prompt of an earlier row"
        if one.longest is not None and limits.conversation is not None:
            place, tokens = one.longest
            if tokens + limits.reply > limits.conversation:
                yield (
                    f"the longest {_name(split)} prompt has {tokens} tokens ({place}); with a reply of rollout.maxTokens {limits.reply} it exceeds "
                    f"maxModelLen {limits.conversation}: raise maxModelLen, or leave such rows out"
                )
    if num_tasks is not None and num_tasks > len(tasks.train):
        yield f"training.data.tasks is {num_tasks}, and there are {len(tasks.train)} training rows: rows repeat within a pass"


def task_warnings(one: ShownTask) -> Iterator[str]:
    """Yield sentences on the rewards of a task's known replies."""
    truth, empty, place = one.of_truth, one.of_empty, one.task.place
    if empty is None:
        return
    for name in CERTAIN:
        if truth is not None and truth.metrics.get(name, 1.0) != 1.0:
            yield f"{place}: the truth {one.task.rendered.truth!r:.60} as a reply has {name} {truth.metrics[name]:g}, not 1: no reply may earn it"
        if empty.metrics.get(name, 0.0) != 0.0:
            yield f"{place}: an empty reply has {name} {empty.metrics[name]:g}, not 0"
    if truth is not None and not one.is_partial and float(empty.reward) >= float(truth.reward):  # type: ignore[arg-type]
        yield f"{place}: an empty reply has the reward {empty.reward:g}, as much as the truth: nothing is learnt from this row"


def _name(split: Split) -> str:
    return "training" if split is Split.TRAIN else "held-out"


def as_json(one: ShownTask) -> dict[str, Any]:
    """Return a task for `--json`."""
    return {
        "index": one.index,
        "place": one.task.place,
        "prompt": _messages(one.task),
        "tokens": one.tokens,
        "truth": one.task.rendered.truth,
        "rewardOfTruth": None if one.of_truth is None else one.of_truth.reward,
        "rewardOfEmptyReply": None if one.of_empty is None else one.of_empty.reward,
        "trained": [{"text": reply.text, "tokens": reply.num_tokens} for reply in one.trained],
        "warnings": list(task_warnings(one)),
    }
