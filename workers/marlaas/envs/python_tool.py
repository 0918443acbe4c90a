"""`python-tool`: solve a puzzle with programs. A ```python block in a reply runs restricted; its output is the next message."""

import sys
from typing import Any

from marlaas.environment import Agent, Message, Score, Task
from marlaas.envs.extraction import extractor, program
from marlaas.envs.locked.program import Limits, NotLocked, Ran, prove, run_program
from marlaas.envs.puzzles import Puzzles
from marlaas_api.errors import InvalidInput

SYSTEM = (
    "You solve tasks with Python. Write a program in a ```python block: it is run, and you are told what it printed. "
    "Then reply with the answer only."
)
_MIN_MEMORY_MIB = 64


class PythonTool:
    """Solve a puzzle of reasoning-gym with Python: programs in ```python blocks run restricted, a reply without one is the answer.

    A program has no network, no processes or threads, no files but its own scratch folder, an empty environment,
    and bounded time, memory and output. Its errors are shown to the policy and never end the episode.

    Args:
        dataset: name in reasoning-gym.
        config: arguments of the dataset.
        curriculum: levels of the dataset's own curriculum, {attribute: level} or {attribute: [first, last]}.
        curriculum_tasks: training tasks over which levels rise from first to last; held-out tasks have the last.
        answer: where the answer is: last_number, boxed, tag (<answer>…</answer>), regex, or whole reply.
        pattern: the regular expression for answer: regex; its first group is the answer.
        system: system prompt; "" for none.
        suffix: text after the question.
        needs_program: reward an answer only if a program ran without an error before.
        cpu_s: seconds of processor time of one program; its wall-clock limit is four times as long.
        memory_mib: memory of one program.
        max_output: characters of the program's output that the policy gets.
    """

    def __init__(  # noqa: PLR0913
        self,
        dataset: str = "basic_arithmetic",
        config: dict[str, Any] | None = None,
        curriculum: dict[str, Any] | None = None,
        curriculum_tasks: int = 0,
        answer: str = "last_number",
        pattern: str | None = None,
        system: str = SYSTEM,
        suffix: str = "",
        needs_program: bool = False,
        cpu_s: int = 5,
        memory_mib: int = 256,
        max_output: int = 1000,
    ) -> None:
        self._extract = extractor(answer, pattern)
        self._puzzles = Puzzles(dataset, config or {}, curriculum or {}, curriculum_tasks)
        self._system = (Message("system", system),) if system else ()
        self._suffix = suffix
        self._needs_program = needs_program
        self._limits = _checked_limits(cpu_s, memory_mib)
        self._max_output = max_output
        if max_output < 1:
            raise InvalidInput(f"python-tool: max_output is {max_output}; expected 1 character or more")
        if sys.platform == "linux":  # on other systems a manifest can still be checked; playing raises the reason
            _prove()

    def play(self, task: Task, agent: Agent) -> Score:
        """Run programs until a reply has none. That reply is the answer."""
        puzzle = self._puzzles.draw(task)
        reply = agent.ask((*self._system, Message("user", puzzle.question + self._suffix))).text
        all_ran: list[Ran] = []
        while (text := program(reply)) is not None:
            all_ran.append(self._run(agent, text))
            reply = agent.ask(Message("tool", tool_output(all_ran[-1], self._max_output), name="python")).text
        correct = puzzle.score(agent, self._extract(reply))
        num_ok = sum(ran.is_ok for ran in all_ran)
        reward = correct if num_ok or not self._needs_program else 0.0
        return Score(reward, {"correct": correct, **_counted(all_ran), **puzzle.metrics()})

    def _run(self, agent: Agent, text: str) -> Ran:
        """Run the program as a tool call, so that its time counts.

        A failure to run it at all is raised after the tool context: it is a fault of the machine, not of the policy.
        """
        fault: Exception
        with agent.tool():
            try:
                return run_program(text, self._limits)
            except Exception as error:
                fault = error
        raise fault


def tool_output(ran: Ran, max_chars: int) -> str:
    """Return the tool message for a program: its output with the middle cut out, and the reason if it was stopped."""
    output = ran.output.strip()
    cut = len(output) - max_chars
    if cut > 0:
        output = (
            f"{output[: max_chars - max_chars // 2]}\n[{cut} characters cut]\n{output[len(output) - max_chars // 2 :]}"
        )
    if ran.stopped is not None:
        output = f"{output}\n[stopped: {ran.stopped}]".lstrip()
    elif ran.exit_code and not output:
        output = f"[exit code {ran.exit_code}]"
    return output or "[no output]"


def _counted(all_ran: list[Ran]) -> dict[str, float]:
    return {
        "programs": float(len(all_ran)),
        "programs_failed": float(sum(not ran.is_ok for ran in all_ran)),
        "programs_stopped": float(sum(ran.stopped is not None for ran in all_ran)),
    }


def _prove() -> None:
    try:
        prove()
    except NotLocked as error:
        raise InvalidInput(f"python-tool: {error}") from None


def _checked_limits(cpu_s: int, memory_mib: int) -> Limits:
    if cpu_s < 1:
        raise InvalidInput(f"python-tool: cpu_s is {cpu_s}; expected 1 second or more")
    if memory_mib < _MIN_MEMORY_MIB:
        raise InvalidInput(f"python-tool: memory_mib is {memory_mib}; expected {_MIN_MEMORY_MIB} or more")
    return Limits(cpu_s=cpu_s, memory_bytes=memory_mib << 20)
