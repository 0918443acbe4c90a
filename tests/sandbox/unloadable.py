"""Environments that cannot be loaded. Imported by fork servers only."""

import os
import subprocess
import sys
import time
from pathlib import Path


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


class EndsWithAProcess:
    def __init__(self):
        started = subprocess.Popen(["sleep", "1000"])
        Path(os.environ["TMPDIR"], "started").write_text(str(started.pid))
        os._exit(4)

    def play(self, task, agent): ...
