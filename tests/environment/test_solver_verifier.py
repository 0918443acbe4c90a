"""`solver-verifier`: rewards by hand, drafts of which half are right, and the example's manifest."""

import random
from pathlib import Path

import pytest

from marlaas.environment import EpisodeState, Message, Split, Task
from marlaas.environment_types import TurnRequest
from marlaas.envs.loading import resolve
from marlaas.envs.playing import Outcome, play_episode
from marlaas.envs.scripted import RecordedReplies
from marlaas.envs.solver_verifier import first_word, one_digit_off
from marlaas.manifest import load
from marlaas_api.errors import InvalidInput

EXAMPLE = Path(__file__).parents[2] / "examples" / "agents" / "solver-verifier.yaml"


def played(
    index: int, solver: str, verifier: str, split: Split = Split.TRAIN
) -> tuple[Outcome, dict[str, TurnRequest]]:
    """Return the outcome of an episode with fixed replies, and what each agent was asked."""
    replies = {"solver": solver, "verifier": verifier}
    channel = RecordedReplies(lambda request: replies[request.agent])
    environment = resolve("solver-verifier", {}).create()
    outcome = play_episode(environment, Task(split, index, 7), EpisodeState(list(replies), channel))
    return outcome, {one.request.agent: one.request for one in channel.asked}


def last(request: TurnRequest) -> str:
    message = request.append[-1]
    assert isinstance(message, Message)
    return message.content


def draft(index: int, split: Split = Split.TRAIN) -> tuple[int, int, int]:
    """Return both numbers and the drafted sum, as the verifier sees them."""
    left, _, right, _, result = last(played(index, "", "", split)[1]["verifier"]).split()
    return int(left), int(right), int(result)


@pytest.mark.parametrize(("index", "right"), [(0, "right"), (1, "wrong")])
def test_each_agent_has_its_own_reward(index: int, right: str) -> None:
    left, other, _ = draft(index)
    for solver, solved in ((f"It is {left + other}.", 1.0), (f"{left + other + 1}", 0.0), ("", 0.0)):
        for verifier, judged in ((right, 1.0), (f"{right.title()}. Why", 1.0), ("maybe", 0.0), ("", 0.0)):
            outcome, _ = played(index, solver, verifier)
            assert outcome.rewards == {"solver": solved, "verifier": judged}
            assert outcome.metrics == {"solved": solved, "judged": judged, "verdicts": judged}


def test_both_agents_get_the_same_sum_and_the_verifier_a_short_turn() -> None:
    _, asked = played(0, "", "")
    left, right, result = draft(0)
    assert last(asked["solver"]) == f"Calculate {left} + {right}."
    assert left + right == result
    assert asked["verifier"].max_tokens == 4


@pytest.mark.parametrize("split", list(Split))
def test_half_of_the_drafts_are_right_so_one_fixed_word_is_right_half_of_the_time(split: Split) -> None:
    drafts = [draft(index, split) for index in range(64)]
    assert sum(left + right == result for left, right, result in drafts) == 32
    assert [left + right == result for left, right, result in drafts[:4]] == [True, False, True, False]
    rewards = [played(index, "", "right", split)[0].rewards["verifier"] for index in range(64)]
    assert sum(rewards) == 32.0


def test_sums_of_training_are_not_those_of_evaluations_and_drafts_are_fixed() -> None:
    trained, held_out = ({draft(index, split)[:2] for index in range(64)} for split in Split)
    assert trained
    assert not trained & held_out
    assert [draft(index) for index in range(8)] == [draft(index) for index in range(8)]


def test_a_wrong_draft_differs_in_one_digit() -> None:
    rng = random.Random(3)
    for number in ("7", "14", "120"):
        for _ in range(50):
            other = one_digit_off(number, rng)
            assert sum(a != b for a, b in zip(number, other, strict=True)) == 1
            assert other[0] != "0"


@pytest.mark.parametrize(
    ("reply", "word"), [("Right!", "right"), (" **wrong**\nno", "wrong"), ("wrongly", "wrongly"), ("12", ""), ("", "")]
)
def test_the_first_word_of_a_reply(reply: str, word: str) -> None:
    assert first_word(reply) == word


def test_sums_too_small_to_have_held_out_ones_are_refused() -> None:
    with pytest.raises(InvalidInput, match="max_operand is 2; expected 9 to 999"):
        resolve("solver-verifier", {"max_operand": 2}).create()


def test_the_example_is_valid_and_its_verifier_has_settings_of_its_own() -> None:
    manifest = load([EXAMPLE], runnable=True)
    assert [str(note) for note in manifest.notes] == []
    (job,) = manifest.jobs
    solver, verifier = job.spec.agents
    assert (solver.name, verifier.name) == ("solver", "verifier")
    assert solver.training is None
    assert solver.adapter.rank < verifier.adapter.rank
    assert verifier.training is not None
    assert verifier.training.optimizer is not None
