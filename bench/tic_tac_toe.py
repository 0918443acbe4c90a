"""Tic-tac-toe, exactly: results of a policy against a random and against a perfect player, and the perfect player's moves.

A policy maps boards (`envs.tic_tac_toe`) to the probabilities of the numbers of cells; the rest is an illegal reply.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Self

from marlaas.envs.tic_tac_toe import EMPTY, MARKS, free, has_won, to_move

Policy = Mapping[str, Mapping[str, float]]
Opponent = Callable[[str], Mapping[str, float]]
"""Returns the probabilities of a player's legal moves on a board."""


@dataclass(frozen=True, slots=True)
class Results:
    """Probabilities of the ends of a game for one player. An illegal reply is a loss of its own kind."""

    won: float = 0.0
    drawn: float = 0.0
    lost: float = 0.0
    illegal: float = 0.0

    @property
    def value(self) -> float:
        """Expected reward: 1 for a win, -1 for a loss or an illegal reply."""
        return self.won - self.lost - self.illegal

    def plus(self, share: float, other: Self) -> "Results":
        """Return these results and a share of others."""
        return Results(
            self.won + share * other.won,
            self.drawn + share * other.drawn,
            self.lost + share * other.lost,
            self.illegal + share * other.illegal,
        )


def boards() -> list[str]:
    """Return all boards on which a move is to be made, the empty one first."""
    found, queue = {EMPTY: None}, [EMPTY]
    while queue:
        board = queue.pop()
        for after in (board.replace(cell, to_move(board)) for cell in free(board)):
            if after not in found and _end(after) is None:
                found[after] = None
                queue.append(after)
    return list(found)


@cache
def minimax(board: str) -> int:
    """Return the result of perfect play for the mark that moves next: 1 won, 0 drawn, -1 lost."""
    return max(_reply(board, cell) for cell in free(board))


def best_moves(board: str) -> list[str]:
    """Return the moves of a perfect player."""
    return [cell for cell in free(board) if _reply(board, cell) == minimax(board)]


def uniform(board: str) -> dict[str, float]:
    """Return the moves of a random player."""
    return dict.fromkeys(free(board), 1 / len(free(board)))


def perfect(board: str) -> dict[str, float]:
    """Return the moves of a perfect player that chooses evenly among its best ones."""
    best = best_moves(board)
    return dict.fromkeys(best, 1 / len(best))


def results(policy: Policy, mark: str, opponent: Opponent) -> Results:
    """Return the exact results of a policy that plays one mark from the empty board against an opponent."""
    known: dict[str, Results] = {}

    def of(board: str) -> Results:
        if board not in known:
            known[board] = _from(board)
        return known[board]

    def _from(board: str) -> Results:
        if (end := _end(board)) is not None:
            return Results(won=float(end == mark), drawn=float(end == ""), lost=float(end not in ("", mark)))
        mover = to_move(board)
        moves = policy[board] if mover == mark else opponent(board)
        found = Results(illegal=max(0.0, 1.0 - sum(moves.get(cell, 0.0) for cell in free(board))))
        for cell in free(board):
            if share := moves.get(cell, 0.0):
                found = found.plus(share, of(board.replace(cell, mover)))
        return found

    return of(EMPTY)


def _reply(board: str, cell: str) -> int:
    """Return the result of a move for the mark that makes it, if both then play perfectly."""
    mark = to_move(board)
    after = board.replace(cell, mark)
    end = _end(after)
    return -minimax(after) if end is None else int(end == mark)


def _end(board: str) -> str | None:
    """Return the mark that has won, an empty text after a draw, and None while the game goes on."""
    winner = next((mark for mark in MARKS if has_won(board, mark)), None)
    return winner if winner is not None else None if free(board) else ""
