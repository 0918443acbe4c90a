"""`solver-verifier`: one agent answers sums, the other one says whether a draft of the answer is right."""

import random
import re
import string

from marlaas.environment import Agent, Agents, Message, Score, Task
from marlaas.envs.extraction import last_number
from marlaas_api.errors import InvalidInput

RIGHT, WRONG = "right", "wrong"
_MIN_OPERAND, _MAX_OPERAND = 9, 999
_SHOTS = (("11 + 3", "15", WRONG), ("2 + 12", "14", RIGHT))
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
    """Sums of two numbers: `solver` answers them, and `verifier` judges two drafts of the answer. Each has its own reward.

    The drafts are the sum, and the sum with one digit replaced. The verifier judges each in a conversation of its own; the
    first word of a reply counts, `right` or `wrong`. All turns run at the same time.

    The solver's reward is 1 if the last number of its reply is the sum. The verifier's is 1 if both verdicts are right, so
    it is 0 for a verifier that always says the same. The solver's own replies are not judged: they become right ever more
    often, so `right` would be a good verdict for anything.

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
        drafts = {RIGHT: answer, WRONG: one_digit_off(answer, task.rng)}
        with agents.together() as at_once:
            reply = at_once.run(agents.solver.say, f"Calculate {left} + {right}.")
            verdicts = {
                truth: at_once.run(verdict_on, agents.verifier.begin(), f"{left} + {right} = {draft}")
                for truth, draft in drafts.items()
            }
        solved = float(last_number(reply.result.text) == answer)
        found = {truth: part.result for truth, part in verdicts.items()}
        judged = sum(word == truth for truth, word in found.items()) / len(found)
        formed = sum(word in (RIGHT, WRONG) for word in found.values()) / len(found)
        rewards = {"solver": solved, "verifier": float(judged == 1)}
        return Score(rewards, {"solved": solved, "judged": judged, "verdicts": formed})


def verdict_on(verifier: Agent, draft: str) -> str:
    """Return the first word of the verifier's reply to a draft."""
    return first_word(verifier.ask((*_EXAMPLES, Message("user", draft)), max_tokens=_VERDICT_TOKENS).text)


def one_digit_off(number: str, rng: random.Random) -> str:
    """Return the number with one digit replaced by another one. The first digit does not become 0."""
    at = rng.randrange(len(number))
    others = set(string.digits[at == 0 :]) - {number[at]}
    return number[:at] + rng.choice(sorted(others)) + number[at + 1 :]


def first_word(reply: str) -> str:
    """Return the first word in lower case, without punctuation around it; empty if the reply has none."""
    found = re.search(r"[^\W\d_]+", reply)
    return found[0].lower() if found else ""
