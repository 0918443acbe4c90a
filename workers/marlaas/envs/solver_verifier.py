"""`solver-verifier`: one agent answers sums, the other one says whether a draft of the answer is right."""

import random
import re
import string

from marlaas.environment import Agents, Message, Score, Task
from marlaas.envs.extraction import last_number
from marlaas_api.errors import InvalidInput

RIGHT, WRONG = "right", "wrong"
_MIN_OPERAND, _MAX_OPERAND = 9, 999
_SHOTS = (("2 + 12", "14", RIGHT), ("11 + 3", "15", WRONG), ("12 + 1", "11", WRONG), ("3 + 11", "14", RIGHT))
"""Examples that the verifier sees before its draft. Without them a small model says neither word, so it has no reward to learn from."""
_EXAMPLES = (
    Message("system", f"Reply {RIGHT} or {WRONG}."),
    *(
        message
        for numbers, answer, verdict in _SHOTS
        for message in (Message("user", f"{numbers} = {answer}"), Message("assistant", verdict))
    ),
)
_VERDICT_TOKENS = 4


class SolverVerifier:
    """Sums of two numbers: `solver` answers them, and `verifier` says whether a draft of the answer is right. Each has its own reward.

    The solver's reward is 1 if the last number of its reply is the sum. The verifier's is 1 if the first word of its reply
    is the right one of `right` and `wrong`. Both speak at the same time.

    Drafts are made from the task: the sum for tasks of even index; for the others the sum with one digit replaced. So half of
    the drafts are right, and no fixed reply is right more often than that. The solver's own replies would become right ever
    more often, and a verifier that only says `right` would be paid for it.

    Args:
        max_operand: largest number in a sum, 9 to 999; the smallest is 1.
    """

    agents = ("solver", "verifier")

    def __init__(self, max_operand: int = 10) -> None:
        if not _MIN_OPERAND <= max_operand <= _MAX_OPERAND:
            raise InvalidInput(
                f"solver-verifier: max_operand is {max_operand}; expected {_MIN_OPERAND} to {_MAX_OPERAND}"
            )
        self._max_operand = max_operand

    def play(self, task: Task, agents: Agents) -> Score:
        """Play one episode of one turn of each agent."""
        left, right = task.draw(lambda rng: (rng.randint(1, self._max_operand), rng.randint(1, self._max_operand)))
        answer = str(left + right)
        is_right = task.index % 2 == 0
        draft = answer if is_right else one_digit_off(answer, task.rng)
        shown = (*_EXAMPLES, Message("user", f"{left} + {right} = {draft}"))
        with agents.together() as at_once:
            reply = at_once.run(agents.solver.say, f"Calculate {left} + {right}.")
            verdict = at_once.run(lambda: agents.verifier.ask(shown, max_tokens=_VERDICT_TOKENS))
        solved = float(last_number(reply.result.text) == answer)
        word = first_word(verdict.result.text)
        judged = float(word == (RIGHT if is_right else WRONG))
        metrics = {"solved": solved, "judged": judged, "verdicts": float(word in (RIGHT, WRONG))}
        return Score({"solver": solved, "verifier": judged}, metrics)


def one_digit_off(number: str, rng: random.Random) -> str:
    """Return the number with one digit replaced by another one. The first digit does not become 0."""
    at = rng.randrange(len(number))
    others = set(string.digits[at == 0 :]) - {number[at]}
    return number[:at] + rng.choice(sorted(others)) + number[at + 1 :]


def first_word(reply: str) -> str:
    """Return the first word in lower case, without punctuation around it; empty if the reply has none."""
    found = re.search(r"[^\W\d_]+", reply)
    return found[0].lower() if found else ""
