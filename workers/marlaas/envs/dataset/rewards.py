"""The parts of a data set's reward: of a reply by itself, by a judge, by its length, and by a comparison with the other replies of its group."""

import importlib
import inspect
import secrets
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from marlaas.environment import Play, Reply, Score
from marlaas.envs.dataset import math_check
from marlaas.envs.dataset.judge import Ask, Judge
from marlaas.envs.dataset.problems import InvalidArgument
from marlaas.envs.dataset.settings import CodeSettings, CosineSettings, JudgeSettings, RewardSettings, Settings
from marlaas.envs.dataset.tasks import TaskRow
from marlaas.envs.extraction import Extract, extractor, program
from marlaas.envs.loading import nearest
from marlaas.envs.locked.program import Limits, NotLocked, prove, run_program
from marlaas.rewards import Part, Rubric, answer_reward, cosine_length, format_reward, shorter
from marlaas.scores import number
from marlaas_api.errors import InvalidInput

CERTAIN = ("math", "correct", "code")
"""Names of the parts that are 1 for a right answer and 0 for a wrong one."""
MATH_TIMEOUT = "math_timeout"
"""Metric beside `math`: 1 for a comparison that was stopped at its time limit."""


class Rewards:
    """The reward of a reply to a row.

    Attributes:
        judge: the part of a judge, if there is one.
        compares: whether parts compare the replies of a group (`compare`).
        left_out: kinds of parts that a reply by itself does not have.

    Raises:
        InvalidArgument: a part's settings are not valid, or its function cannot be imported.
    """

    def __init__(self, settings: Settings) -> None:
        every = list(enumerate(settings.rewards))
        parts = [(one.weight, _part(at, one)) for at, one in every if one.kind not in _LATER]
        self.judge, self._judge_weight = None, 0.0
        self._cosine: list[tuple[float, CosineSettings]] = []
        self._group: list[tuple[float, str, GroupPart]] = []
        for at, one in every:
            if one.judge is not None:
                self.judge, self._judge_weight = _judge(at, one.judge), one.weight
            if one.cosine is not None:
                self._cosine.append((one.weight, one.cosine))
            if one.shorter is not None:
                self._group.append((one.weight, "shorter", _shorter))
            if one.group is not None:
                compared = _function(at, one.group, "group")
                self._group.append((one.weight, str(getattr(compared, "__name__", "group")), compared))
        try:
            self._rubric = Rubric(*parts) if parts else None
        except InvalidInput as error:
            raise InvalidArgument(str(error), "rewards") from None
        self.compares = bool(self._group)
        self.left_out = [one.kind for one in settings.rewards if one.kind in ("judge", "shorter", "group")]
        self._extractors = [extract for one in settings.rewards for extract in _extractors(one)]

    def score(self, reply: Reply, task: TaskRow, ask: Ask | None = None) -> Score:
        """Score a reply. ask: how the judge is asked; None: its part is left out.

        Raises:
            InvalidInput: with the row's place; a part returns no number.
            ServiceFailed: the judge has failed.
            Other exceptions: of the parts.
        """
        row, truth = task.row, task.rendered.truth
        try:
            score = Score(0.0)
            if self._rubric is not None:
                score = self._rubric.score(
                    reply=reply, truth=truth, row=row, tests=task.rendered.tests, place=task.place
                )
            if self.judge is not None and ask is not None:
                score = _plus(score, self._judge_weight, "judge", self.judge.score(reply, row, truth, ask))
            for weight, cosine in self._cosine:
                bounds = cosine.right if _is_right(score.metrics) else cosine.wrong
                value = cosine_length(reply.num_tokens, cosine.max_tokens, bounds, cosine.exceeded)
                score = _plus(score, weight, "cosine", {"cosine": value})
            data = {"text": reply.message, "num_tokens": reply.num_tokens} if self.compares else None
            return replace(score, answer=self._answer(reply), data=data)
        except Exception as error:
            if isinstance(error, InvalidInput):
                raise InvalidInput(f"{task.place}: {error}") from error
            error.add_note(f"This is the reward of a reply to the row at {task.place}.")
            raise

    def compare(self, plays: Sequence[Play], task: TaskRow, agent: str) -> list[Score]:
        """Return the scores of an agent's replies to one row, with the parts that compare them.

        Raises InvalidInput, with the row's place: a part returns no list of as many numbers; and what the parts raise.
        """
        replies = [GroupReply(**one.data, metrics=one.metrics) for one in plays]
        scores = [Score(one.rewards[agent]) for one in plays]
        for weight, name, part in self._group:
            values = part(**_given(part, replies, task))
            if (
                isinstance(values, str)
                or not isinstance(values, Iterable)
                or len(values := list(values)) != len(replies)
            ):
                raise InvalidInput(
                    f"{task.place}: the reward {name!r} gave {values!r:.80} for {len(replies)} replies; expected a number for each"
                )
            numbers = [number(value, f"{task.place}: the value of {name!r}") for value in values]
            scores = [_plus(score, weight, name, {name: value}) for score, value in zip(scores, numbers, strict=True)]
        return [replace(score, reward={agent: score.reward}) for score in scores]  # type: ignore[dict-item]

    def _answer(self, reply: Reply) -> str | None:
        """Return the answer by which a suite finds the most frequent one; None if no part extracts any."""
        found = (extract(reply.message) for extract in self._extractors)
        return next((answer.strip() for answer in found if answer is not None), None)


@dataclass(frozen=True, slots=True)
class GroupReply:
    """A reply of a group, for a function that compares them. text: with the opening. metrics: of its other parts."""

    text: str
    num_tokens: int
    metrics: Mapping[str, float]


GroupPart = Callable[..., Any]
_LATER = ("judge", "cosine", "shorter", "group")
"""Kinds that need more than a reply and its row."""


def _plus(score: Score, weight: float, name: str, values: Mapping[str, float]) -> Score:
    """Return a score with a part's value added; values: its metrics."""
    reward: Any = score.reward
    return replace(score, reward=reward + weight * values[name], metrics={**score.metrics, **values})


def _is_right(metrics: Mapping[str, float | None]) -> bool:
    return any(metrics.get(name) == 1.0 for name in CERTAIN)


def _shorter(replies: Sequence[GroupReply]) -> list[float]:
    return shorter([one.num_tokens for one in replies], [_is_right(one.metrics) for one in replies])


def _given(part: GroupPart, replies: Sequence[GroupReply], task: TaskRow) -> dict[str, Any]:
    """Return the arguments that a part takes, by the names of its parameters."""
    every = {"replies": replies, "truth": task.rendered.truth, "row": task.row, "place": task.place}
    parameters = inspect.signature(part).parameters
    if unknown := [name for name, one in parameters.items() if name not in every and one.default is one.empty]:
        raise InvalidInput(
            f"{task.place}: a reward of a group needs {unknown[0]!r}{nearest(unknown[0], every)}; given are {', '.join(every)}"
        )
    return {name: every[name] for name in parameters if name in every}


def _judge(at: int, settings: JudgeSettings) -> Judge:
    try:
        return Judge(settings, at)
    except InvalidArgument:
        raise
    except InvalidInput as error:
        raise InvalidArgument(str(error), "rewards", at, "judge", "extract") from None


def _part(at: int, settings: RewardSettings) -> Part:
    try:
        if settings.answer is not None:
            return answer_reward(settings.answer.extract, settings.answer.pattern)
        if settings.format is not None:
            return format_reward(settings.format)
    except InvalidInput as error:
        raise InvalidArgument(str(error), "rewards", at, settings.kind) from None
    if settings.code is not None:
        return _code_reward(at, settings.code)
    if settings.python is not None:
        return _function(at, settings.python)
    return _math_reward()


def _extractors(settings: RewardSettings) -> list[Extract]:
    """Return what finds a reply's answer: as the part `answer` does; for `math` the last box, or else the last number."""
    if settings.answer is not None:
        return [extractor(settings.answer.extract, settings.answer.pattern)]
    return [extractor("boxed", None), extractor("last_number", None)] if settings.math is not None else []


def _math_reward() -> Part:
    """Return a part `math`: 1 if math-verify finds that the reply's answer equals the truth. A comparison over time is 0."""
    math_check.load()

    def math(reply: Reply, truth: str) -> Any:
        found = math_check.is_equal(truth, reply.message)
        return Score(float(bool(found)), {MATH_TIMEOUT: float(found is None)})

    return math


def _code_reward(at: int, settings: CodeSettings) -> Part:
    """Return a part `code`: 1 if the reply's last program and the tests after it run to their end without an error.

    The tests end with a line that only a run to the end prints, so that a program which exits early earns nothing.
    """
    limits = Limits(cpu_s=settings.cpu_s, memory_bytes=settings.memory_mib << 20)
    if sys.platform == "linux":  # on other systems a manifest can still be checked; playing raises the reason
        try:
            prove()
        except NotLocked as error:
            raise InvalidArgument(str(error), "rewards", at, "code") from None

    def code(reply: Reply, tests: str) -> float:
        written = program(reply.message)
        if written is None:
            return 0.0
        end = secrets.token_hex(16)
        ran = run_program(f"{written}\n\n{tests}\n\nprint({end!r})\n", limits)
        return float(ran.is_ok and ran.output.rstrip().endswith(end))

    return code


def _function(at: int, name: str, kind: str = "python") -> Callable[..., Any]:
    """Return a function of the user's own, `module:function`, from the manifest's folder or PYTHONPATH."""
    module_name, _, attribute = name.partition(":")
    loc = ("rewards", at, kind)
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and error.name == module_name:
            raise InvalidArgument(
                f"module {module_name!r} was not found beside the manifest or on PYTHONPATH", *loc
            ) from None
        raise InvalidArgument(f"importing {module_name} failed: {type(error).__name__}: {error}", *loc) from None
    found: Callable[..., Any] | None = getattr(module, attribute, None)
    if not callable(found):
        raise InvalidArgument(f"{module_name} has no function {attribute!r}{nearest(attribute, vars(module))}", *loc)
    return found
