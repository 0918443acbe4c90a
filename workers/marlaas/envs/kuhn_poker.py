"""`kuhn-poker`: a zero-sum game of two agents with three cards. Good play mixes moves at random: it bluffs and calls sometimes."""

import itertools

from marlaas.environment import Agents, Score, Task

CARDS = ("jack", "queen", "king")
"""The cards, the lowest first."""
PASS, BET = "pass", "bet"
DEALS = tuple(itertools.permutations(CARDS, 2))
"""The six deals: the card of `first`, and that of `second`."""
PLAYERS = ("first", "second")
Moves = tuple[str, ...]
ENDS: frozenset[Moves] = frozenset({(PASS, PASS), (BET, PASS), (BET, BET), (PASS, BET, PASS), (PASS, BET, BET)})
"""Moves at the end of a game."""
_BETS = frozenset("abcdefghijklm")


def move_of(reply: str) -> str:
    """Return the move that a reply stands for: a bet if its first character is a letter from a to m, else a pass.

    So every reply is a legal move, also an empty one. Upper-case letters count like lower-case ones.
    """
    return BET if reply[:1].lower() in _BETS else PASS


def information(card: str, moves: Moves) -> str:
    """Return all that a player knows, as text: its own card and the moves so far."""
    return " ".join((card, *moves))


def prompt(known: str) -> str:
    """Return the message to a player. known: see `information`."""
    return f"kuhn: {known}"


def chips(deal: tuple[str, str], moves: Moves) -> int:
    """Return the chips that `first` wins at the end of a game; `second` loses as many.

    Each player pays one chip before the deal. A bet is one more chip. After a bet, a pass gives up and a bet calls. If nobody
    gives up, the higher card wins.
    """
    if moves[-2:] == (BET, PASS):
        return 1 if moves[0] == BET else -1
    stake = 2 if BET in moves else 1
    return stake if CARDS.index(deal[0]) > CARDS.index(deal[1]) else -stake


class KuhnPoker:
    """Kuhn poker: `first` and `second` have one card each of three, and pass or bet in turns until the game ends.

    Task number `index` has deal `index` modulo 6, in training and in evaluations: there are only six different tasks. An
    agent's reward is the chips that it wins, -2 to 2. Each turn is a new conversation.
    """

    agents = PLAYERS

    def play(self, task: Task, agents: Agents) -> Score:
        """Play one game: one or two turns of `first`, and one of `second`."""
        deal, moves = DEALS[task.index % len(DEALS)], Moves()
        while moves not in ENDS:
            player = len(moves) % 2
            reply = agents[PLAYERS[player]].begin().say(prompt(information(deal[player], moves)))
            moves += (move_of(reply.text),)
        won = chips(deal, moves)
        return Score({"first": won, "second": -won}, _metrics(deal, moves))


def _metrics(deal: tuple[str, str], moves: Moves) -> dict[str, float]:
    """Return whether `first` bet at once, a jack bet before the other player did, a bet was called, and cards were compared."""
    bluffed = BET in moves and deal[moves.index(BET) % 2] == CARDS[0]
    return {
        "opened": float(moves[0] == BET),
        "bluffed": float(bluffed),
        "called": float(moves[-2:] == (BET, BET)),
        "showdown": float(moves[-2:] != (BET, PASS)),
    }
