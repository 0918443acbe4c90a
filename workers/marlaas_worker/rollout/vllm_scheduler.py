"""vLLM's scheduler with an `OutputBuffer`; imported by vLLM's core process (`scheduler_cls`).

Only for engines without asynchronous scheduling, as on a CPU: there vLLM uses another class.
"""

from collections.abc import Iterable
from typing import Any

from vllm.v1.core.sched.scheduler import Scheduler

from marlaas_worker.rollout.output_buffer import OutputBuffer


class BufferingScheduler(Scheduler):  # type: ignore[misc]
    """Sends two messages per request instead of one per step."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._outputs = OutputBuffer()

    def update_from_output(self, *arguments: Any, **options: Any) -> dict[int, Any]:
        """Return what to send to each client. Clients without anything to receive are left out."""
        found: dict[int, Any] = super().update_from_output(*arguments, **options)
        for client, message in list(found.items()):
            message.outputs = self._outputs.pass_on(message.outputs)
            if not (message.outputs or message.finished_requests or message.scheduler_stats):
                del found[client]
        return found

    def finish_requests(self, request_ids: str | Iterable[str] | None, finished_status: Any) -> list[Any]:
        """Finish requests from outside, as vLLM does, and drop their outputs."""
        finished: list[Any] = super().finish_requests(request_ids, finished_status)
        self._outputs.forget([request.request_id for request in finished])
        return finished
