"""Environments that report their own share of the CPU."""

import os
import time
from pathlib import Path

from marlaas import Agent, Score, Task

WAIT_S = 20.0


def share(task: Task, agent: Agent) -> Score:
    return Score(1.0, metrics={"session": _niceness_of_session(), "process": float(os.nice(0))})


def computes(task: Task, agent: Agent) -> Score:
    """Compute until the share is low."""
    first, until = _niceness_of_session(), time.monotonic() + WAIT_S
    while os.nice(0) == 0 and time.monotonic() < until:
        pass
    return Score(1.0, metrics={"first": first, "session": _niceness_of_session(), "process": float(os.nice(0))})


def escapes(task: Task, agent: Agent) -> Score:
    readable, writable = os.pipe()
    if os.fork() == 0:
        os.setsid()
        fresh, until = _niceness_of_session(), time.monotonic() + WAIT_S
        while _niceness_of_session() == fresh and time.monotonic() < until:
            time.sleep(0.05)
        os.write(writable, f"{fresh} {_niceness_of_session()}".encode())
        os._exit(0)
    fresh, later = map(float, os.read(readable, 100).split())
    return Score(1.0, metrics={"fresh": fresh, "later": later})


def _niceness_of_session() -> float:
    return float(Path("/proc/self/autogroup").read_text().split()[-1])


class Loads:
    """Its `__init__` waits, until the share is low if it is told to."""

    def __init__(self, until_low: bool = False) -> None:
        self.first, until = _niceness_of_session(), time.monotonic() + WAIT_S * until_low
        while _niceness_of_session() == 0.0 and time.monotonic() < until:
            time.sleep(0.05)
        self.last = _niceness_of_session()

    def play(self, task: Task, agent: Agent) -> Score:
        return Score(1.0, metrics={"first": self.first, "last": self.last})
