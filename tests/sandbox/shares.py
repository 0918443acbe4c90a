"""Environments that report their own share of the CPU."""

import os
import time
from pathlib import Path

from marlaas import Agent, Score, Task


def computes(task: Task, agent: Agent) -> Score:
    first = _niceness_of_session()
    while os.nice(0) == 0:
        pass
    return Score(1.0, metrics={"first": first, "session": _niceness_of_session(), "process": float(os.nice(0))})


def escapes(task: Task, agent: Agent) -> Score:
    readable, writable = os.pipe()
    if os.fork() == 0:
        os.setsid()
        while _niceness_of_session() <= 0.0:
            time.sleep(0.05)
        os.write(writable, str(_niceness_of_session()).encode())
        os._exit(0)
    return Score(1.0, metrics={"session": float(os.read(readable, 100))})


def _niceness_of_session() -> float:
    return float(Path("/proc/self/autogroup").read_text().split()[-1])


class Loads:
    """Its `__init__` waits, until the share is low if it is told to."""

    def __init__(self, until_low: bool = False) -> None:
        self.first = _niceness_of_session()
        while until_low and _niceness_of_session() == 0.0:
            time.sleep(0.05)
        self.last = _niceness_of_session()

    def play(self, task: Task, agent: Agent) -> Score:
        return Score(1.0, metrics={"first": self.first, "last": self.last})
