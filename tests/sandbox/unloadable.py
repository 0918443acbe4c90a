"""Environments that cannot be loaded. Imported by fork servers only."""

import os
import sys
import time


class Broken:
    def __init__(self):
        sys.stdout.write("trying hard")
        raise OSError("the data set is missing")

    def play(self, task, agent): ...


class EndsItself:
    def __init__(self):
        os._exit(4)

    def play(self, task, agent): ...


class NeverReady:
    def __init__(self):
        time.sleep(1000)

    def play(self, task, agent): ...
