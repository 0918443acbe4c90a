"""Kills of roles at failpoints: where one is killed, and where it was; and ends of processes that are no children of ours."""

import os
import select

from marlaas_api import failpoints


class Killed(BaseException):
    """A role is killed here, as by kill -9: nothing is drained."""


def kill_at(place: str, *passes: int) -> list[str]:
    """Kill a role each given time that it passes a failpoint, the first time by default; return all that are passed."""
    passed: list[str] = []

    def hook(name: str) -> None:
        passed.append(name)
        if name == place and passed.count(place) in (passes or (1,)):
            raise Killed(name)

    failpoints.hook = hook
    return passed


def kills(error: BaseException) -> list[str]:
    """The failpoints that killed a role: of tasks that run at the same time, several may be at one."""
    if isinstance(error, BaseExceptionGroup):
        return [place for one in error.exceptions for place in kills(one)]
    return [str(error)]


def assert_gone(*processes: int) -> None:
    """Wait until these processes, by their pidfds, have ended, and close the descriptors."""
    for process in processes:
        ended, _, _ = select.select([process], [], [], 30.0)
        os.close(process)
        assert ended
