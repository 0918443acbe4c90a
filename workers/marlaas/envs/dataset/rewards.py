"""The parts of a data set's reward: mathematics, extracted answers, form, tests of programs, and functions of the user's own."""

import importlib
import secrets
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from marlaas.environment import Reply, Score
from marlaas.envs.dataset import math_check
from marlaas.envs.dataset.problems import InvalidArgument
from marlaas.envs.dataset.settings import CodeSettings, RewardSettings, Settings
from marlaas.envs.dataset.tasks import TaskRow
from marlaas.envs.extraction import Extract, extractor, program
from marlaas.envs.loading import nearest
from marlaas.envs.locked.program import Limits, NotLocked, prove, run_program
from marlaas.rewards import Part, Rubric, answer_reward, format_reward
from marlaas_api.errors import InvalidInput

CERTAIN = ("math", "correct", "code")
"""Names of the parts that are 1 for a right answer and 0 for a wrong one."""


class Rewards:
    """The reward of a reply to a row.

    Raises:
        InvalidArgument: a part's settings are not valid, or its function cannot be imported.
    """

    def __init__(self, settings: Settings) -> None:
        self.parts = [(one.weight, _part(at, one)) for at, one in enumerate(settings.rewards)]
        try:
            self._rubric = Rubric(*self.parts)
        except InvalidInput as error:
            raise InvalidArgument(str(error), "rewards") from None
        self._extractors = [extract for one in settings.rewards for extract in _extractors(one)]

    def score(self, reply: Reply, task: TaskRow) -> Score:
        """Score a reply. Raises InvalidInput, with the row's place: a part returns no number; and what the parts raise."""
        try:
            score = self._rubric.score(
                reply=reply, truth=task.rendered.truth, row=task.row, tests=task.rendered.tests, place=task.place
            )
            return replace(score, answer=self._answer(reply))
        except Exception as error:
            if isinstance(error, InvalidInput):
                raise InvalidInput(f"{task.place}: {error}") from error
            error.add_note(f"This is the reward of a reply to the row at {task.place}.")
            raise

    def _answer(self, reply: Reply) -> str | None:
        """Return the answer by which a suite finds the most frequent one; None if no part extracts any."""
        found = (extract(reply.message) for extract in self._extractors)
        return next((answer.strip() for answer in found if answer is not None), None)

    def names(self) -> list[str]:
        """Return the names of the parts, which are those of metrics."""
        return [str(getattr(part, "__name__", "")) for _, part in self.parts]


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
        return Score(float(bool(found)), {"math_timeout": float(found is None)})

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


def _function(at: int, name: str) -> Part:
    """Return a function of the user's own, `module:function`, from the manifest's folder or PYTHONPATH."""
    module_name, _, attribute = name.partition(":")
    loc = ("rewards", at, "python")
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
