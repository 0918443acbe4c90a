"""Environments that do what environments do on bad days. Imported by sandbox children only."""

import ctypes
import json
import os
import random
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path

from marlaas import Score, ServiceFailed
from marlaas.envs.dataset.problems import SourceSilent

NUM_IMPORTS = 0
MIB = 1 << 20


def asks(task, agent, turns=1):
    replies = [agent.say(f"{task.split} {task.index} {turn}").text for turn in range(turns)]
    return float(replies[-1])


class Ranks:
    """The reward of a reply is its place in its group; of the reply `no`, it is unscored."""

    def __init__(self, then=""):
        self.then = then

    def play(self, task, agent):
        reply = agent.say("a number")
        return Score(None if reply.text == "no" else 0.0, {"size": 1.0}, data=reply.text)

    def score_group(self, task, plays):
        if self.then == "fails":
            raise ServiceFailed("the ranking service is away")
        if self.then == "few":
            return [1.0]
        return [Score(sum(one.data > other.data for other in plays), {"of": len(plays)}) for one in plays]


def raises(task, agent):
    agent.say("hello")
    secret = {}
    return secret["reward"]


def hangs(task, agent):
    agent.say("from here on")
    time.sleep(1000)


def spins(task, agent):
    agent.say("from here on")
    while True:
        pass


def exits(task, agent):
    sys.exit(3)


def ends_at_once(task, agent):
    os._exit(7)


def is_killed(task, agent):
    os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(1000)


def segfaults(task, agent):
    ctypes.string_at(0)


def eats_memory(task, agent):
    hoard = []
    while True:
        hoard.append(bytearray(16 * MIB))


def leaks(task, agent, mib=150):
    hoard = bytearray(mib * MIB)
    hoard[::4096] = b"x" * len(hoard[::4096])
    time.sleep(1000)


def eats_memory_in_processes(task, agent):
    for _ in range(4):
        if os.fork() == 0:
            leaks(task, agent, mib=40)
    time.sleep(1000)


def after_a_wait(play):
    def waits(task, agent):
        time.sleep(1.0)
        play(task, agent)

    return waits


leaks_after_a_wait, leaks_in_a_process_after_a_wait = map(after_a_wait, (leaks, eats_memory_in_processes))


def _channel():
    for number in [int(entry.name) for entry in Path("/proc/self/fd").iterdir()]:
        try:
            if stat.S_ISSOCK(os.fstat(number).st_mode):
                return socket.socket(fileno=number)
        except OSError:
            continue
    raise AssertionError("no pipe")


def writes_garbage(task, agent):
    _channel().sendall(b"\x00\x00\x00\x05hello")
    time.sleep(1000)


def writes_a_lot(task, agent):
    _channel().sendall(b"\xff" * 64)
    time.sleep(1000)


def claims_a_foreign_turn(task, agent):
    agent.say("one")
    agent._parent = 5
    agent.say("two")


def closes_everything(task, agent):
    os.closerange(0, 64)
    time.sleep(1000)


def floods(task, agent):
    for _ in range(300):
        sys.stdout.write("noise " * 1000)
    raise RuntimeError("after the flood")


def floods_for_ever(task, agent):
    agent.say("from here on")
    while True:
        sys.stdout.write("noise " * 1000)


def forks_a_lot(task, agent):
    for _ in range(100):
        if os.fork() == 0:
            time.sleep(1000)
    time.sleep(1000)


def in_its_tool(play):
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


def is_fine(task, agent):
    return 1.0


def does_what_it_is_told(task, agent):
    """The policy's first reply names what it does. It waits as long as it likes for that reply."""
    return globals()[agent.say("what?").text](task, agent)


def leaves_daemons(task, agent, file=""):
    """A child, a grandchild in a session of its own, and an orphan of it; all outlive the episode unless somebody minds."""
    subprocess.Popen(["sleep", "1000"])
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            Path(file).write_text(str(os.getpid()))
            time.sleep(1000)
        os._exit(0)
    os.wait()
    while not (Path(file).exists() and Path(file).read_text()):
        time.sleep(0.005)
    return 1.0


def comes_back_twice(task, agent):
    os.fork()
    return 1.0


def leaves_a_thread(task, agent):
    threading.Thread(target=time.sleep, args=(1000,)).start()
    return 1.0


def returns_nan(task, agent):
    return float("nan")


def paints_the_terminal(task, agent):
    raise RuntimeError("\x1b]52;c;ZXZpbA==\x07\x1b[2Jall is well\u202e")


def returns_too_much(task, agent):
    return 1.7e308


def forgets_its_reward(task, agent):
    """No reward was returned or set."""


def limits_a_tool_in_a_thread(task, agent):
    """A part of the episode, in a thread, whose tool has a time limit: it is not over."""
    with agent.together() as at_once:
        part = at_once.run(_checked, agent)
    return part.result


def _checked(agent):
    with agent.tool(timeout_s=3600):
        return 1.0


def sets_no_number_in_a_tool(task, agent):
    with agent.tool():
        agent.reward = "high"
    return 1.0


def earns_too_much_in_a_tool(task, agent):
    agent._episode.rewards[agent.name] = 1.7e308  # not by the SDK, which would refuse it
    with agent.tool():
        pass
    return 1.0


def rewards_a_stranger(task, agent):
    return {"stranger": 1.0}


def calls_a_stranger(task, agents):
    agents.stranger.say("hello")


def names_a_stranger(task, agent): ...


names_a_stranger.agents_of = lambda task: ["stranger"]


def needs_a_stranger(task, agents): ...


needs_a_stranger.agents = ("stranger",)


def kills_the_fork_server(task, agent):
    marker = Path(os.environ["MARKER"])
    if not marker.exists():
        marker.touch()
        os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(1000)
    return 1.0


def fails_twice(task, agent):
    marker = Path(os.environ["MARKER"])
    lives = len(marker.read_text()) if marker.exists() else 0
    marker.write_text("x" * (lives + 1))
    if lives < 2:
        raise RuntimeError(f"life {lives}")
    return 1.0


def stops_the_fork_server(task, agent):
    os.kill(os.getppid(), signal.SIGSTOP)
    return 1.0


class Tells:
    """Loads once, plays often, and tells what it finds in its process."""

    def __init__(self):
        global NUM_IMPORTS
        NUM_IMPORTS += 1
        self.pid = os.getpid()
        self.num_plays = 0

    def play(self, task, agent):
        self.num_plays += 1
        found = {
            "loads": NUM_IMPORTS,
            "plays": self.num_plays,
            "loaded_in": self.pid,
            "variables": sorted(os.environ),
            "secrets": Path("/proc/self/environ").read_text().count("SECRET"),
            "is_home_imported": not sys.flags.no_user_site,
            "randomness": f"{task.rng.random()} {random.random()} {hash('text')}",
            "folder": os.environ["TMPDIR"],
        }
        agent.say(json.dumps(found))
        return 1.0


class LeavesAProcess:
    def __init__(self):
        self.left = subprocess.Popen(["sleep", "1000"], start_new_session=True)

    def play(self, task, agent):
        while Path(f"/proc/{self.left.pid}").exists():
            time.sleep(0.01)
        return 1.0


class HoldsAFile:
    def __init__(self):
        self.file = Path(__file__).open()  # noqa: SIM115

    def play(self, task, agent):
        return float(len(self.file.readline()))


def hangs_with_a_child(task, agent):
    """Prints who is to vanish: the fork server, itself, and a process that it started."""
    started = subprocess.Popen(["sleep", "1000"], start_new_session=True)
    sys.stdout.write(f"{os.getppid()} {os.getpid()} {started.pid} ready")
    time.sleep(1000)


# of several agents, and with parts at the same time --------------------------------------------------------------------


class TwoAgents:
    def play(self, task, agents):
        question = agents["proposer"].say("ask").text
        first = agents["solver"].say(question)
        agents["solver"].fork().say("again")
        agents["solver"].say("and again")
        agents["proposer"].begin().say("afresh")
        return {"proposer": 0.25, "solver": float(len(first.text))}


def both_at_once(task, agents):
    def twice(agent):
        return float(agent.say("one").text) + float(agent.say("two").text)

    with agents.together() as at_once:
        parts = {name: at_once.run(twice, agent) for name, agent in agents.items()}
    return {name: part.result for name, part in parts.items()}


def floods_one_by_one(task, agents):
    agents.steady.say("hi")
    agents.steady.reward = 0.5
    agents.flood.reward = 0.25
    while True:
        agents.flood.say("on")


def dies_at_once(task, agents, file=""):
    with agents.together() as at_once:
        for agent in agents.values():
            at_once.run(agent.say, "hi")
        while not Path(file).exists():
            time.sleep(0.005)
        os.kill(os.getpid(), signal.SIGSEGV)


def calls_the_first(task, agents, end=""):
    agents.a.reward = 0.25
    agents.a.say("?")
    with agents.a.tool():
        if end:
            os._exit(1)
    return 1.0


calls_the_first.agents_of = lambda task, end="": ("a",)


# that cannot be loaded --------------------------------------------------------------------------------------------------


class NeverPlayed:
    def play(self, task, agent): ...


class Broken(NeverPlayed):
    def __init__(self):
        sys.stdout.write("trying hard")
        raise OSError("the data set is missing")


class EndsItself(NeverPlayed):
    def __init__(self):
        os._exit(4)


class NeverReady(NeverPlayed):
    def __init__(self):
        time.sleep(1000)


class Shows:
    def play(self, task, agent):
        return 1.0

    def demonstrate(self, task):
        if task.index == 2:
            raise ValueError("it demonstrates nothing")
        return [{"role": "user", "content": f"{task.split} {task.index}"}, {"role": "assistant", "content": "ok"}]


class LoadsLater(Shows):
    def __init__(self, loads):
        with Path(loads).open("a+") as file:
            if file.write("x") and file.tell() < 4:
                raise SourceSilent("the store does not answer", "source")


class EndsWithAProcess(NeverPlayed):
    def __init__(self):
        started = subprocess.Popen(["sleep", "1000"])
        Path(os.environ["TMPDIR"], "started").write_text(str(started.pid))
        os._exit(4)


# agents behind the OpenAI door ------------------------------------------------------------------------------------------

TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}


def _post(server, **fields):
    import urllib.request

    headers = {"Authorization": f"Bearer {server.api_key}", "Content-Type": "application/json"}
    body = json.dumps({"model": "policy", **fields}).encode()
    with urllib.request.urlopen(urllib.request.Request(f"{server.base_url}/chat/completions", body, headers)) as answer:
        return json.load(answer)


def uses_a_tool(task, agent):
    asked = [{"role": "user", "content": "1 + 2?"}]
    with agent.openai() as server:
        first = _post(server, messages=asked, tools=[TOOL], temperature=0.5)
        message = first["choices"][0]["message"]
        answer = {"role": "tool", "content": "3", "tool_call_id": message["tool_calls"][0]["id"]}
        second = _post(server, messages=[*asked, message, answer], tools=[TOOL])
        return {"policy": float(second["choices"][0]["message"]["content"]) + first["usage"]["prompt_tokens"]}
