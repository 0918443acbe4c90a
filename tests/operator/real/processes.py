"""Operator processes, forked from one that has imported everything: a start costs no imports."""

import ctypes
import importlib
import multiprocessing
import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from pathlib import Path

from tests.tables import data

import marlaas_operator.__main__ as entry

_FORKSERVER = multiprocessing.get_context("forkserver")
_FORKSERVER.set_forkserver_preload(["pytest", __name__])
_PR_SET_PDEATHSIG = 1


@dataclass
class ForkedOperator:
    """`python -m marlaas_operator …` without the imports; it ends with the test process, also with one that is killed.

    failpoint: as in MARLAAS_FAILPOINT. variant: `hasty` or `patient`: the operator with the waits of cases.yaml.
    """

    arguments: Sequence[str]
    log: Path
    failpoint: str = ""
    variant: str = ""
    _process: BaseProcess | None = field(default=None, init=False)

    @property
    def process(self) -> BaseProcess:
        assert self._process is not None, "it was not started"
        return self._process

    @property
    def pid(self) -> int:
        return self.process.pid or 0

    @property
    def alive(self) -> bool:
        return self.process.is_alive()

    def start(self) -> None:
        words = tuple(self.arguments), str(self.log), self.failpoint, self.variant
        self._process = _FORKSERVER.Process(target=_operate, args=words, daemon=True)
        self._process.start()

    def kill(self) -> None:
        """SIGKILL, and wait until it is gone."""
        self.process.kill()
        self.process.join()

    def wait(self, timeout_s: float) -> int:
        """Its exit code once it has ended by itself."""
        self.process.join(timeout_s)
        assert self.process.exitcode is not None, f"the operator still runs after {timeout_s:.0f} s"
        return self.process.exitcode

    def last_words(self, num_lines: int = 15) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-num_lines:]) if self.log.exists() else ""


def _operate(arguments: Sequence[str], log: str, failpoint: str, variant: str) -> None:
    """In the child: become the operator."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(output, 1)
    os.dup2(output, 2)
    if failpoint:
        os.environ["MARLAAS_FAILPOINT"] = failpoint
    for path, value in (data(__file__, "variants")[variant] if variant else {}).items():
        module, _, name = path.rpartition(".")
        setattr(importlib.import_module(f"marlaas_operator.{module}"), name, value)
    sys.exit(entry.main(arguments))
