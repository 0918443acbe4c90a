"""A job with the requests of its sandbox, and the replies to a request."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from marlaas_api.messages import (
    CancelRequest,
    ChatMessage,
    GenerateReply,
    GenerateRequest,
    JobDocument,
    KeepRequest,
    ReplyPhase,
)
from marlaas_api.names import AdapterRef, episode_id, train_group


@dataclass
class Job:
    """A job, and the requests that its sandbox sends."""

    document: JobDocument

    @property
    def uid(self) -> str:
        return self.document.uid

    def adapter(self, version: int, agent: str = "policy") -> AdapterRef:
        return AdapterRef(self.document.namespace, self.document.job, self.uid, agent, version)

    def request(self, index: int = 0, member: int = 0, turn: int = 0, **changes: Any) -> GenerateRequest:
        group = train_group(self.document.ref, index)
        fields: dict[str, Any] = {
            "namespace": self.document.namespace,
            "job": self.document.job,
            "uid": self.uid,
            "agent": "policy",
            "group": group,
            "member": member,
            "episode": episode_id(group, member, 1),
            "turn": turn,
            "parent": turn - 1 if turn else None,
            "append": (ChatMessage(role="user", content=f"question {turn}"),),
            "deadline_s": 60.0,
        }
        return GenerateRequest(**{**fields, **changes})

    def cancel(self) -> CancelRequest:
        return CancelRequest(**self._episode())

    def keep(self) -> KeepRequest:
        return KeepRequest(**self._episode())

    def _episode(self) -> dict[str, Any]:
        return self.request().model_dump(include={"namespace", "job", "uid", "agent", "episode"})


@dataclass
class Asked:
    """The replies to a request, in order of arrival."""

    heard: list[GenerateReply] = field(default_factory=list)
    over: asyncio.Event = field(default_factory=asyncio.Event)
    more: asyncio.Event = field(default_factory=asyncio.Event)

    def hear(self, reply: GenerateReply) -> None:
        self.heard.append(reply)
        self.more.set()
        if reply.phase in (ReplyPhase.RESULT, ReplyPhase.FAILED):
            self.over.set()

    @property
    def without_heartbeats(self) -> list[ReplyPhase]:
        """Phases of the replies; a slow machine adds heartbeats."""
        return [reply.phase for reply in self.heard if reply.phase is not ReplyPhase.HEARTBEAT]

    async def until(self, phase: ReplyPhase) -> GenerateReply:
        return await self._next(0, lambda reply: reply.phase is phase)

    async def until_it_says(self, doing: str) -> GenerateReply:
        """The first heartbeat from now on that says that the request does this."""
        return await self._next(
            len(self.heard), lambda reply: reply.phase is ReplyPhase.HEARTBEAT and doing in reply.doing
        )

    async def _next(self, first: int, wanted: Callable[[GenerateReply], bool]) -> GenerateReply:
        while True:
            for reply in self.heard[first:]:
                if wanted(reply):
                    return reply
            self.more.clear()
            await self.more.wait()

    async def end(self) -> GenerateReply:
        await self.over.wait()
        return next(reply for reply in self.heard if reply.phase in (ReplyPhase.RESULT, ReplyPhase.FAILED))
