"""Environments whose `play` is `async def`: their agents' turns are awaited, and parts of an episode are asyncio tasks.

    async def play(task, agents):
        async with agents.together() as at_once:
            parts = {name: at_once.run(agent.say, task.prompt) for name, agent in agents.items()}
        best = await agents.judge.say(...)

Each episode has an event loop of its own. A turn is requested in a thread, because channels block. A turn that has begun is
waited for, also when its task is cancelled, so that no turn's record depends on the moment of a cancellation.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from contextlib import AbstractAsyncContextManager
from functools import partial
from threading import Thread
from typing import Any, TypeVar

from marlaas.agent_base import AgentBase, AgentsBase, Candidate, Prompt, Stop, Tool, as_tool_error
from marlaas.branches import PATIENCE_S, Branch, Part, raise_first
from marlaas.environment_types import Message, Reply, TurnRequest
from marlaas.episode_state import EpisodeState

_T = TypeVar("_T")


class AsyncAgents(AgentsBase["AsyncAgent"]):
    """The agents of the job by name, for an `async def play`: `agents.solver`, or `agents["solver-2"]`."""

    def __init__(self, episode: EpisodeState) -> None:
        super().__init__(episode, AsyncAgent)

    def together(self) -> "AbstractAsyncContextManager[AsyncTogether]":
        """Return a context in which parts of the episode run at the same time (`AsyncTogether.run`)."""
        return _together(self.__dict__["_episode"])


class AsyncAgent(AgentBase):
    """One policy of the job in one conversation, for an `async def play`. Each call continues after the turn before."""

    async def say(self, text: str, *, max_tokens: int | None = None, stop: Stop = ()) -> Reply:
        """Append a user message and return the agent's reply of at most `max_tokens` tokens. Raises TurnLimit."""
        return await self.ask(Message("user", text), max_tokens=max_tokens, stop=stop)

    async def ask(
        self,
        messages: Message | Iterable[Message | Mapping[str, Any]],
        *,
        max_tokens: int | None = None,
        tools: Iterable[Tool] | None = None,
        stop: Stop = (),
    ) -> Reply:
        """Append messages and return the agent's reply; arguments as of `Agent.ask`. Raises TurnLimit."""
        return await self._turn(self._asked(messages, max_tokens, tools, stop))

    async def complete(self, text: str, *, max_tokens: int | None = None, stop: Stop = ()) -> Reply:
        """Append raw text without the chat template and return the agent's continuation. Raises TurnLimit."""
        return await self._turn(self._raw(text, max_tokens, stop))

    async def branch(self, prompt: Prompt, n: int, *, max_tokens: int | None = None) -> "list[Candidate[AsyncAgent]]":
        """Return `n` different replies to one prompt, all from the present state of this conversation; see `Agent.branch`."""
        choice, request = self._new_choice(prompt, n, max_tokens)
        if not self._episode.may_divide:
            turns = self._episode.begin(request, n)
            return self._candidates(choice, await self._in_thread(partial(self._episode.generate, turns)))

        async def candidate() -> Reply:
            (turn,) = self._episode.begin(request)
            return await self._in_thread(turn)

        async with _together(self._episode, is_choice=True) as block:
            parts = [block.run(candidate) for _ in range(n)]
        return self._candidates(choice, [part.result for part in parts])

    @contextlib.asynccontextmanager
    async def tool(self, timeout_s: float | None = None) -> AsyncIterator[None]:
        """Run a tool call of the policy: an exception inside this context becomes a ToolError; see `Agent.tool`.

        A call that takes longer than `timeout_s` is cancelled where it awaits.
        """
        with self._episode.tool_call(), as_tool_error():
            try:
                async with asyncio.timeout(timeout_s) as limit:
                    yield
            except TimeoutError as error:
                if limit.expired():
                    raise TimeoutError(f"the tool took longer than {timeout_s:g} s") from error
                raise

    def together(self) -> "AbstractAsyncContextManager[AsyncTogether]":
        """Return a context in which parts of the episode run at the same time (`AsyncTogether.run`)."""
        return _together(self._episode)

    async def _turn(self, request: TurnRequest) -> Reply:
        with self._opened(request) as turn:
            return self._continued(await self._in_thread(turn))

    async def _in_thread(self, call: Callable[[], _T]) -> _T:
        """Await a call in a thread. A cancellation is raised after its end, unless a person is asked, who may leave."""
        part, loop, ended = Part(), asyncio.get_running_loop(), asyncio.Event()

        def run() -> None:
            part.settle(call, ())
            with contextlib.suppress(RuntimeError):  # the loop is closed: the person has left
                loop.call_soon_threadsafe(ended.set)

        Thread(target=run, daemon=True).start()
        cancelled = None
        while not ended.is_set():
            try:
                await ended.wait()
            except asyncio.CancelledError as error:
                cancelled = error
                if self._episode.in_order:
                    break
        if cancelled is not None:
            raise cancelled
        raise_first([part])
        value: _T = part.value
        return value


class AsyncTogether:
    """Parts of an episode that run at the same time, each as a task; otherwise as `Together`.

    async with agents.together() as at_once:
        plan = at_once.run(agents.planner.say, task.prompt)
        critique = at_once.run(review, agents.critic)
    print(plan.result.text)
    """

    def __init__(self, episode: EpisodeState, block: int) -> None:
        self._episode, self._block = episode, block
        self._parts: list[tuple[asyncio.Task[None], Part]] = []
        self._last: tuple[asyncio.Task[None], Branch] | None = None

    def run(self, function: Callable[..., Awaitable[object]], *arguments: object) -> Part:
        """Start a part. The context waits for its end, and raises the first exception, in the order of the parts."""
        part, branch, last = Part(), self._episode.begin_branch(self._block), self._last

        async def play() -> None:
            if last is not None and self._episode.in_order:
                await _end_of(*last)
            self._episode.enter(branch)
            try:
                part.value = await function(*arguments)
            except BaseException as error:  # raised again in the task of `play`
                part.error = error
            self._episode.enter(None)

        task = asyncio.create_task(play())
        self._parts.append((task, part))
        self._last = (task, branch)
        return part

    async def join(self) -> None:
        """Wait for all parts; a cancellation cancels them too."""
        try:
            await _all_ended(task for task, _ in self._parts)
        finally:
            for _, part in self._parts:
                part.is_over = True

    def finish(self) -> None:
        """Raise the first part's exception, if any has one."""
        raise_first(part for _, part in self._parts)


def play_async(code: Callable[[AsyncAgents], Awaitable[object]], episode: EpisodeState) -> object:
    """Play one episode of an environment whose `play` is `async def`. Returns and raises what `code` returns and raises."""

    async def play() -> object:
        episode.be_called_by(asyncio.current_task, "task")
        return await code(AsyncAgents(episode))

    return asyncio.run(play())


@contextlib.asynccontextmanager
async def _together(episode: EpisodeState, *, is_choice: bool = False) -> AsyncIterator[AsyncTogether]:
    block = AsyncTogether(episode, episode.open_block())
    try:
        yield block
    finally:
        try:
            await block.join()
        finally:
            episode.close_block(is_choice=is_choice)
    block.finish()


async def _all_ended(tasks: Iterable[asyncio.Task[None]]) -> None:
    """Wait for the end of tasks. A cancellation cancels them, and is raised after their end."""
    waiting, cancelled = set(tasks), None
    while waiting:
        try:
            _, waiting = await asyncio.wait(waiting)
        except asyncio.CancelledError as error:
            cancelled = error
            for task in waiting:
                task.cancel()
    if cancelled is not None:
        raise cancelled


async def _end_of(task: asyncio.Task[None], branch: Branch) -> None:
    """Wait for the end of the part before, as `Together.run` does."""
    while not task.done():
        await asyncio.wait({task}, timeout=PATIENCE_S)
        if not branch.num_open:
            return
