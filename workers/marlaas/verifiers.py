"""`verifiers`: tasksets of the `verifiers` library (0.4, MIT) as environments, through its public API and our OpenAI server.

The library's agent runs the taskset's own task: prompt, hooks, rewards and metrics. On the model's side runs the
smallest harness, a chat loop in this process, because the library's other harnesses start programs that fetch
packages. docs/how-to/openai.md lists the limits. This module is imported only when a job names it: the library is large
and optional (`pip install 'marlaas[verifiers]'`).
"""

import asyncio
import itertools
import os
import statistics
from collections.abc import Iterable
from typing import Any

from marlaas.environment import Agent, Agents, Score, Split, Task
from marlaas.openai_server import OpenAIServer
from marlaas_api.errors import InvalidInput
from marlaas_api.names import split_of

try:
    import openai.resources.chat  # import once, here: openai loads its submodules on first use, which would be in every episode
    import verifiers.v1 as vf  # type: ignore[import-untyped]
except ModuleNotFoundError as error:
    raise InvalidInput(
        f"the environment 'verifiers' needs the package {error.name!r}: pip install 'marlaas[verifiers]'"
    ) from error

_KEY = "MARLAAS_OPENAI_API_KEY"
_MAX_TASKS = 10_000


class Verifiers:
    """Plays a taskset of the `verifiers` library.

    The reward is the trace's: the weighted sum of the task's rewards. Each reward and each metric is recorded by name.

    Args:
        taskset: id of an installed taskset (a module that exports it), as in `vf-eval <taskset>`.
        config: the taskset's own configuration.
        max_turns: model turns after which verifiers ends a rollout and scores it. 0: the job's maxTurns ends it,
            unscored.
        num_tasks: number of tasks to take from an endless taskset.
    """

    def __init__(
        self, taskset: str, config: dict[str, Any] | None = None, max_turns: int = 0, num_tasks: int = 1000
    ) -> None:
        self._max_turns = max_turns or None
        self._tasks = _tasks_of(taskset, config or {}, num_tasks)

    def play(self, task: Task, agent: Agent) -> Score:
        """Play one rollout. Raises TurnLimit, and RuntimeError with the library's text if the library reports an error."""
        tasks = self._tasks[task.split]
        with agent.openai() as server:
            trace = asyncio.run(self._run(tasks[task.index % len(tasks)], agent.name, server))
            if not trace.ok:
                raise RuntimeError("; ".join(f"{one.type}: {one.message}" for one in trace.errors) or "no rollout")
        return Score(trace.reward, _metrics([trace]))

    async def _run(self, task: Any, model: str, server: OpenAIServer) -> Any:
        config = vf.AgentConfig(**_seat(model, server), max_turns=self._max_turns)
        agent = vf.make_agent(config)
        agent.harness = ChatLoop(config.harness)
        async with agent:
            return await agent.run(task)


class VerifiersTeam:
    """Plays a multi-agent environment of the `verifiers` library (`vf.Env` with `run(task, agents)`).

    Each of its agents is the job's agent of the same name. An agent's reward is that of its trace: the weighted sum of the
    rewards that the task and the environment have recorded on it; the mean if the agent ran several times, 0 if it never ran.

    Args:
        taskset: id of an installed taskset.
        env: id of an installed environment, such as `user-sim`; empty: the one that the taskset's module exports.
        config: the taskset's own configuration.
        settings: the environment's own configuration. Model, client, runtime and harness of agents are set by this class.
            `max_concurrent_agents` is 1 in strict jobs and otherwise without limit, unless it is given.
        num_tasks: number of tasks to take from an endless taskset.
    """

    def __init__(
        self,
        taskset: str,
        env: str = "",
        config: dict[str, Any] | None = None,
        settings: dict[str, Any] | None = None,
        num_tasks: int = 1000,
    ) -> None:
        self._names = self.agents(taskset, env)
        self._settings = (settings or {}) | {"id": env, "taskset": (config or {}) | {"id": taskset}}
        self._tasks = _tasks_of(taskset, config or {}, num_tasks)
        try:
            vf.resolve_env_config(self._settings)
        except (TypeError, ValueError) as error:
            raise InvalidInput(f"verifiers: settings of environment {env or taskset!r}: {error}") from error

    @staticmethod
    def agents(taskset: str, env: str = "", **_: object) -> tuple[str, ...]:
        """Return the names of the agents of an environment. Raises InvalidInput."""
        try:
            fields = vf.env_config_type(taskset, env).model_fields.items()
        except (ImportError, AttributeError, TypeError, ValueError) as error:
            raise InvalidInput(f"verifiers: environment {env or taskset!r}: {error}") from error
        return tuple(name for name, field in fields if isinstance(field.default, vf.AgentConfig))

    def play(self, task: Task, agents: Agents) -> Score:
        """Play one episode. Raises TurnLimit, and RuntimeError with the library's text if the library reports an error."""
        tasks = self._tasks[task.split]
        with agents[self._names[0]].openai() as server:
            episode = asyncio.run(self._run(tasks[task.index % len(tasks)], server))
            if not episode.ok:
                errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
                raise RuntimeError("; ".join(f"{one.type}: {one.message}" for one in errors) or "no episode")
        traces = {name: [one for one in episode.traces if one.agent.name == name] for name in self._names}
        rewards = {name: _mean(one.reward for one in own) for name, own in traces.items()}
        metrics = {f"{name}/{key}": value for name, own in traces.items() for key, value in _metrics(own).items()}
        return Score(rewards, metrics)

    async def _run(self, task: Any, server: OpenAIServer) -> Any:
        seats = {name: dict(self._settings.get(name) or {}) | _seat(name, server) for name in self._names}
        at_once = {} if server.is_strict else {"max_concurrent_agents": None}
        env = vf.load_environment(vf.resolve_env_config(at_once | self._settings | seats))
        setup = env.setup

        async def with_chat_loops(agents: Any) -> None:
            for name in self._names:
                agent = getattr(agents, name)
                agent.harness = ChatLoop(agent.harness.config)
            await setup(agents)

        env.setup = with_chat_loops
        async with env.serving():
            # Every agent has a model and a client of its own, so these are never used.
            unused = vf.ModelContext(model=self._names[0], client=_client(server))
            return await env.run_episode(task, unused)


class ChatLoop(vf.Harness[vf.HarnessConfig]):  # type: ignore[misc]
    """Harness that requests one reply to the task's prompt. For more turns, the task sends the next message (`vf.Interaction`)."""

    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_RESUME = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(  # noqa: PLR0913  # the library's own signature
        self,
        ctx: Any,
        trace: Any,
        runtime: Any,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: Any,
    ) -> Any:
        """Run the harness (see `vf.Harness.launch`): send every model call to `endpoint`, and start no program."""
        system, prompt = self.resolve_prompt(data)
        messages: list[Any] = [{"role": "system", "content": system}] if system else []
        if isinstance(prompt, str):
            messages.append({"role": "user", "content": prompt})
        else:
            messages += [message.model_dump(exclude_none=True) for message in prompt or []]
        async with openai.AsyncOpenAI(base_url=endpoint, api_key=secret, max_retries=0, timeout=None) as client:
            await client.chat.completions.create(model=ctx.model, messages=messages)
        return vf.ProgramResult(0, "", "")


def _seat(name: str, server: OpenAIServer) -> dict[str, Any]:
    """Return how the library runs an agent: with the chat loop, and with the job's agent of this name as its model."""
    return {
        "harness": vf.HarnessConfig(id="null"),
        "runtime": vf.SubprocessConfig(),
        "model": name,
        "client": _client(server),
    }


def _client(server: OpenAIServer) -> Any:
    # The library reads the key from an environment variable. This process belongs to the episode alone.
    os.environ[_KEY] = server.api_key
    return vf.EvalClientConfig(base_url=server.base_url, api_key_var=_KEY)


def _mean(values: Iterable[float]) -> float:
    found = list(values)
    return statistics.fmean(found) if found else 0.0


def _metrics(traces: list[Any]) -> dict[str, float]:
    """Return the mean of each reward and each metric over an agent's traces."""
    found: dict[str, list[float]] = {}
    for trace in traces:
        scores = {f"reward/{name}": one.score for name, one in trace.rewards.items() if one is not None}
        for name, value in (scores | trace.metrics).items():
            if value is not None:
                found.setdefault(name, []).append(float(value))
    return {name: _mean(values) for name, values in found.items()}


def _tasks_of(taskset: str, config: dict[str, Any], num_tasks: int) -> dict[Split, list[Any]]:
    """Return the tasks by split; a hash of the task's own key holds out one in eight. Raises InvalidInput."""
    try:
        loaded = vf.load_taskset(vf.taskset_config_type(taskset).model_validate(config | {"id": taskset}))
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise InvalidInput(f"verifiers: taskset {taskset!r}: {error}") from error
    split: dict[Split, list[Any]] = {one: [] for one in Split}
    for task in itertools.islice(loaded, _MAX_TASKS if loaded.bounded else num_tasks):
        split[split_of(task.key)].append(task)
    if not all(split.values()):
        raise InvalidInput(f"verifiers: taskset {taskset!r} has too few tasks to train on some and hold out others")
    return split
