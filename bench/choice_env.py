"""A task of three turns with a decision in the middle, for `bench agents --only branch`; found on PYTHONPATH.

The policy spells a word backwards, then calls the calculator or does not (the decision), then answers from its result.
The reward is 1 if both the word and the answer are right.
"""

from collections.abc import Callable

from marlaas.environment import Agent, Message, Score, Task
from marlaas.envs.extraction import last_number
from marlaas.models.curriculum import calculator_task, requested_expression, reverse_task, tool_reply
from marlaas_api.names import Split, derive_seed

WORD, DECISION, ANSWER = "word", "decision", "answer"
Right = Callable[[str], bool]


def play(task: Task, agent: Agent, candidates: int = 1, branched: tuple[str, ...] = ()) -> Score:
    """Play one episode.

    candidates: of a branched turn in training, each rewarded if it is right; the best goes on. Held-out tasks have none.
    branched: of word, decision, answer.
    """
    seed = derive_seed(task.seed, task.index)
    word, puzzle = reverse_task(task.split, seed), calculator_task(task.split, seed)
    numbers = {turn: candidates for turn in branched if task.split is Split.TRAIN}

    def turn(name: str, agent: Agent, message: Message, right: Right) -> tuple[Agent, str]:
        if name not in numbers:
            return agent, agent.ask(message).text
        choices = agent.branch(message, numbers[name])
        for choice in choices:
            choice.reward = float(right(choice.text))
        best = max(choices, key=lambda choice: choice.reward)
        return best.go_on(), best.text

    _, text = turn(WORD, agent, Message("user", word.prompt), lambda text: text.strip() == word.answer)
    spelled = float(text.strip() == word.answer)
    agent, call = turn(
        DECISION, agent.begin(), Message("user", puzzle.prompt), lambda text: _result(text) == puzzle.answer
    )
    answered = 0.0
    if result := _result(call):
        _, text = turn(ANSWER, agent, Message("tool", result), lambda text: last_number(text) == puzzle.answer)
        answered = float(last_number(text) == puzzle.answer)
    return Score(spelled * answered, {"spelled": spelled, "called": float(result == puzzle.answer)})


def _result(call: str) -> str:
    """Return the tool's reply to a call; empty if the text calls no tool."""
    expression = requested_expression(call)
    return "" if expression is None else tool_reply(expression)
