"""Games: the rules of Kuhn poker and tic-tac-toe with results by hand, and the rewards of `solver-verifier`."""

import random
import string

import pytest
from tests.environment.playing import play_moves, said
from tests.tables import rows

from marlaas.environment import EpisodeState, Split, Task
from marlaas.envs import tic_tac_toe
from marlaas.envs.kuhn_poker import BET, DEALS, PASS, PLAYERS, move_of
from marlaas.envs.loading import resolve
from marlaas.envs.playing import play_episode
from marlaas.envs.scripted import RecordedReplies
from marlaas.envs.solver_verifier import one_digit_off
from marlaas.envs.tic_tac_toe import EMPTY, free, has_won, opening, to_move
from marlaas_api.errors import InvalidInput

KING_JACK, JACK_KING = DEALS.index(("king", "jack")), DEALS.index(("jack", "king"))


def play_kuhn(index, *replies: str, split=Split.TRAIN):
    return play_moves("kuhn-poker", {}, PLAYERS, replies, Task(split, index, 7))


@pytest.mark.parametrize(
    ("moves", "higher", "lower"), [("pp", 1, -1), ("bp", 1, 1), ("bb", 2, -2), ("pbp", -1, -1), ("pbb", 2, -2)]
)
def test_the_chips_of_every_end_with_the_higher_and_the_lower_card(moves, higher, lower):
    for index, won in ((KING_JACK, higher), (JACK_KING, lower)):
        outcome, _ = play_kuhn(index, *moves)
        assert outcome.rewards == {"first": won, "second": -won}
        assert outcome.ending == "completed"


def test_a_player_is_told_its_own_card_of_one_of_six_deals_in_both_splits():
    _, told = play_kuhn(KING_JACK, "p", "b", "b")
    assert told == [("first", "kuhn: king"), ("second", "kuhn: jack pass"), ("first", "kuhn: king pass bet")]
    for split in Split:
        dealt = [[text for _, text in play_kuhn(index, "p", "p", split=split)[1]] for index in range(7)]
        assert dealt[:6] == [[f"kuhn: {first}", f"kuhn: {second} pass"] for first, second in DEALS]
        assert dealt[6] == dealt[0]
    assert len(set(DEALS)) == 6
    assert all(first != second for first, second in DEALS)


def test_letters_of_the_first_half_of_the_alphabet_are_bets_and_any_other_reply_is_a_pass():
    bets = {letter for letter in string.ascii_letters if move_of(letter + "?") == BET}
    assert bets == set("abcdefghijklmABCDEFGHIJKLM")
    others = ("", " bet", "\n", "n", "Zebra", "7", "?", "pass", "é", "\ufffd")
    assert (move_of("bet"), {move_of(reply) for reply in others}) == (BET, {PASS})


@pytest.mark.parametrize(("index", "moves", "metrics"), rows(__file__, "kuhn_metrics"))
def test_metrics_tell_what_happened(index, moves, metrics):
    assert play_kuhn(index, *moves)[0].metrics == metrics


@pytest.fixture
def _from_the_start(monkeypatch):
    monkeypatch.setattr(tic_tac_toe, "opening", lambda _: EMPTY)
    monkeypatch.setattr(Task, "draw", lambda self, generate: generate(self.rng))


def play_ttt(replies, index=0, **args: str):
    return play_moves("tic-tac-toe", args, ["x", "o", *args.values()], replies, Task(Split.TRAIN, index, 7))


@pytest.mark.usefixtures("_from_the_start")
@pytest.mark.parametrize(("replies", "x", "o", "metrics"), rows(__file__, "tic_tac_toe"))
def test_results_of_games(replies, x, o, metrics):
    outcome, _ = play_ttt(replies)
    assert (outcome.rewards, outcome.metrics) == ({"x": x, "o": o}, metrics)


@pytest.mark.usefixtures("_from_the_start")
def test_an_agent_is_told_the_board_and_its_mark():
    _, told = play_ttt("519" + "?")
    boards = ("123456789", "1234x6789", "o234x6789", "o234x678x")
    assert told == [(mark, f"ttt: {board} {mark}") for mark, board in zip("xoxo", boards, strict=True)]


@pytest.mark.usefixtures("_from_the_start")
def test_past_versions_play_o_in_even_tasks_and_x_in_odd_ones():
    even, odd = (play_ttt("51238", index, past="before") for index in (0, 1))
    assert [agent for agent, _ in even[1][:2]] == ["x", "before"]
    assert [agent for agent, _ in odd[1][:2]] == ["before", "o"]
    assert even[0].rewards == {"x": 1, "o": 0, "before": -1}
    assert odd[0].rewards == {"x": 0, "o": -1, "before": 1}


def test_tic_tac_toe_needs_its_agents_and_opens_with_at_most_two_moves():
    resolve("tic-tac-toe", {}).check_agents(["x", "o"])
    with pytest.raises(InvalidInput, match="needs the agents x, o, past; the job lacks past"):
        resolve("tic-tac-toe", {"past": "past"}).check_agents(["x", "o"])
    boards = {opening(random.Random(seed)) for seed in range(2000)}
    assert len(boards) == 1 + 9 + 72
    assert all(len(free(board)) >= 7 and not has_won(board, "x") for board in boards)
    assert {to_move(board) for board in boards} == {"x", "o"}


def played(index, solver, verdict, split=Split.TRAIN):
    """Return the outcome of an episode, and the agents' requests. verdict: the verifier's reply to a draft."""

    def answer(request):
        return solver if request.agent == "solver" else verdict(said(request))

    channel = RecordedReplies(answer)
    environment = resolve("solver-verifier", {}).create()
    outcome = play_episode(environment, Task(split, index, 7), EpisodeState(["solver", "verifier"], channel))
    return outcome, {
        agent: [one.request for one in channel.asked if one.request.agent == agent] for agent in ("solver", "verifier")
    }


def is_right(draft):
    left, _, right, _, result = draft.split()
    return int(left) + int(right) == int(result)


def judge(draft):
    return "Right." if is_right(draft) else "wrong, I think"


def drafts(index, split=Split.TRAIN):
    found = [said(request) for request in played(index, "", judge, split)[1]["verifier"]]
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
def test_the_verifier_is_paid_if_both_verdicts_are_right(verdict, reward, judged, formed):
    outcome, _ = played(0, "", verdict)
    assert outcome.rewards == {"solver": 0.0, "verifier": reward}
    assert outcome.metrics == {"solved": 0.0, "judged": judged, "verdicts": formed}


def test_the_solver_is_paid_for_its_own_answer_and_one_draft_is_right_the_other_off_by_a_digit():
    truth = int(drafts(0)[0].split()[-1])
    for reply, solved in ((f"It is {truth}.", 1.0), (f"{truth} or {truth + 1}", 0.0), ("", 0.0)):
        for verdict in (judge, lambda _: "right"):
            outcome, _ = played(0, reply, verdict)
            assert outcome.rewards["solver"] == outcome.metrics["solved"] == solved
    found = {split: [drafts(index, split) for index in range(64)] for split in Split}
    assert all([is_right(draft) for draft in both] == [True, False] for of_split in found.values() for both in of_split)
    trained, held_out = ({right for right, _ in of_split} for of_split in found.values())
    assert not trained & held_out
    assert [drafts(index) for index in range(8)] == found[Split.TRAIN][:8]
    rng = random.Random(3)
    for number in ("7", "14", "120"):
        for _ in range(50):
            other = one_digit_off(number, rng)
            assert sum(a != b for a, b in zip(number, other, strict=True)) == 1
            assert other[0] != "0"
