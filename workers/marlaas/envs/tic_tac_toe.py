"""`tic-tac-toe`: a game of two agents for self-play. One policy can play both marks, also against its own past versions."""

import random

from marlaas.environment import Agents, Score, Task

EMPTY = "123456789"
"""The empty board: rows from the top, each free cell with its number."""
MARKS = ("x", "o")
LINES = ((0, 1, 2), (3, 4, 5), (6, 7, 8), (0, 3, 6), (1, 4, 7), (2, 5, 8), (0, 4, 8), (2, 4, 6))
_MAX_OPENING = 2


def free(board: str) -> list[str]:
    """Return the numbers of the free cells."""
    return [cell for cell in board if cell.isdigit()]


def to_move(board: str) -> str:
    """Return the mark that moves next; `x` begins."""
    return MARKS[(len(EMPTY) - len(free(board))) % 2]


def has_won(board: str, mark: str) -> bool:
    """Return whether a mark has three in a line."""
    return any(all(board[place] == mark for place in line) for line in LINES)


def prompt(board: str) -> str:
    """Return the message to the agent that moves next."""
    return f"ttt: {board} {to_move(board)}"


def opening(rng: random.Random) -> str:
    """Return the board after 0 to 2 random moves."""
    board = EMPTY
    for _ in range(rng.randint(0, _MAX_OPENING)):
        board = board.replace(rng.choice(free(board)), to_move(board))
    return board


class TicTacToe:
    """Tic-tac-toe: the agents `x` and `o` name free cells in turns. Each turn is a new conversation.

    A task is an opening of 0 to 2 random moves. The reward is 1 for a win, 0 for a draw, and -1 for a loss. An agent whose reply
    does not begin with the number of a free cell ends the game with -1; the other one, which has not won, gets 0.

    Args:
        past: name of a third agent, which takes the place of `o` in even tasks and of `x` in odd ones: usually past versions of
            the policy. Empty: none.
    """

    def __init__(self, past: str = "") -> None:
        self._past = past

    @staticmethod
    def agents(past: str = "") -> tuple[str, ...]:
        """Return the names of the agents that the job must have."""
        return (*MARKS, past) if past else MARKS

    def agents_of(self, task: Task) -> tuple[str, str]:
        """Return the agents that play `x` and `o` in a task."""
        if not self._past:
            return MARKS
        return (MARKS[0], self._past) if task.index % 2 == 0 else (self._past, MARKS[1])

    def play(self, task: Task, agents: Agents) -> Score:
        """Play one game: at most five turns of each agent."""
        names = dict(zip(MARKS, self.agents_of(task), strict=True))
        board = task.draw(opening)
        while free(board):
            mark, other = to_move(board), MARKS[to_move(board) == MARKS[0]]
            cell = agents[names[mark]].begin().say(prompt(board)).text[:1]
            if cell not in free(board):
                return _score(names, {mark: -1.0, other: 0.0}, illegal=True)
            board = board.replace(cell, mark)
            if has_won(board, mark):
                return _score(names, {mark: 1.0, other: -1.0})
        return _score(names, dict.fromkeys(MARKS, 0.0))


def _score(names: dict[str, str], rewards: dict[str, float], *, illegal: bool = False) -> Score:
    drawn = not illegal and not any(rewards.values())
    metrics = {"illegal": float(illegal), "draw": float(drawn), "x_won": float(rewards[MARKS[0]] > 0)}
    return Score({names[mark]: reward for mark, reward in rewards.items()}, metrics)
