"""`solver-verifier`: rewards by hand, one right and one wrong draft of each task, and the example's manifest."""

import random
from collections.abc import Callable

import pytest

from marlaas.environment import EpisodeState, Message, Split, Task
from marlaas.environment_types import TurnRequest
from marlaas.envs.loading import resolve
from marlaas.envs.playing import Outcome, play_episode
from marlaas.envs.scripted import RecordedReplies
from marlaas.envs.solver_verifier import one_digit_off

Asked = dict[str, list[TurnRequest]]


def played(index: int, solver: str, verdict: Callable[[str], str], split: Split = Split.TRAIN) -> tuple[Outcome, Asked]:
    """Return the outcome of an episode, and the agents' requests. verdict: the verifier's reply to a draft."""

    def answer(request: TurnRequest) -> str:
        return solver if request.agent == "solver" else verdict(last(request))

    channel = RecordedReplies(answer)
    environment = resolve("solver-verifier", {}).create()
    outcome = play_episode(environment, Task(split, index, 7), EpisodeState(["solver", "verifier"], channel))
    return outcome, {
        agent: [one.request for one in channel.asked if one.request.agent == agent] for agent in ("solver", "verifier")
    }


def last(request: TurnRequest) -> str:
    message = request.append[-1]
    assert isinstance(message, Message)
    return message.content


def is_right(draft: str) -> bool:
    left, _, right, _, result = draft.split()
    return int(left) + int(right) == int(result)


def judge(draft: str) -> str:
    return "Right." if is_right(draft) else "wrong, I think"


def drafts(index: int, split: Split = Split.TRAIN) -> list[str]:
    """Return the drafts of a task, the right one first."""
    found = [last(request) for request in played(index, "", judge, split)[1]["verifier"]]
    return sorted(found, key=is_right, reverse=True)


@pytest.mark.parametrize(
    ("verdict", "reward", "judged", "formed"),
    [
        (judge, 1.0, 1.0, 1.0),
        (lambda _: "right", 0.0, 0.5, 1.0),
        (lambda _: "wrong", 0.0, 0.5, 1.0),
        (lambda draft: "wrong" if is_right(draft) else "right", 0.0, 0.0, 1.0),
        (lambda draft: "right" if is_right(draft) else "It is wrong", 0.0, 0.5, 0.5),
        (lambda _: "", 0.0, 0.0, 0.0),
    ],
)
def test_the_verifier_is_paid_if_both_verdicts_are_right(
    verdict: Callable[[str], str], reward: float, judged: float, formed: float
) -> None:
    outcome, _ = played(0, "", verdict)
    assert outcome.rewards == {"solver": 0.0, "verifier": reward}
    assert outcome.metrics == {"solved": 0.0, "judged": judged, "verdicts": formed}


def test_the_solvers_reward_depends_on_its_own_answer_alone() -> None:
    truth = int(drafts(0)[0].split()[-1])
    for reply, solved in ((f"It is {truth}.", 1.0), (f"{truth} or {truth + 1}", 0.0), ("", 0.0)):
        for verdict in (judge, lambda _: "right"):
            outcome, _ = played(0, reply, verdict)
            assert outcome.rewards["solver"] == outcome.metrics["solved"] == solved


@pytest.mark.parametrize("split", list(Split))
def test_of_each_tasks_drafts_one_is_right_and_the_other_wrong(split: Split) -> None:
    for index in range(64):
        assert [is_right(draft) for draft in drafts(index, split)] == [True, False]


def test_sums_of_training_are_not_those_of_evaluations_and_drafts_are_fixed() -> None:
    trained, held_out = ({drafts(index, split)[0] for index in range(64)} for split in Split)
    assert trained
    assert not trained & held_out
    assert [drafts(index) for index in range(8)] == [drafts(index) for index in range(8)]


def test_a_wrong_draft_differs_in_one_digit() -> None:
    rng = random.Random(3)
    for number in ("7", "14", "120"):
        for _ in range(50):
            other = one_digit_off(number, rng)
            assert sum(a != b for a, b in zip(number, other, strict=True)) == 1
            assert other[0] != "0"
