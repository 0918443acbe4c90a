"""Environments that do in a tool what those of `rogues` do outside of one. Imported by sandbox children only."""

import os
import signal
from pathlib import Path

from rogues import closes_everything, ends_at_once, hangs, is_killed, leaks


def in_its_tool(play):
    """Do in a tool, with a reward, what another environment does outside of one."""

    def play_in_its_tool(task, agent):
        agent.reward = 0.25
        with agent.tool():
            play(task, agent)

    return play_in_its_tool


def trusts_the_policy(task, agent):
    raise ValueError("the policy wrote nonsense")


breaks_in_its_tool = in_its_tool(trusts_the_policy)
dies_in_its_tool = in_its_tool(ends_at_once)
closes_everything_in_its_tool = in_its_tool(closes_everything)
hangs_in_its_tool = in_its_tool(hangs)
eats_memory_in_its_tool = in_its_tool(leaks)
is_killed_in_its_tool = in_its_tool(is_killed)


def is_killed_in_its_tool_while_the_fork_server_is_stopped(task, agent, file=""):
    Path(file).write_text(str(os.getppid()))
    with agent.tool():
        os.kill(os.getppid(), signal.SIGSTOP)
        is_killed(task, agent)
