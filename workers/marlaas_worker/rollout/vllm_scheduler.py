"""vLLM's schedulers, with counters of their work. vLLM's core process imports this module (`scheduler_cls`)."""

from collections.abc import Iterable
from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

from marlaas_worker.rollout.engine_progress import CountsWork
from marlaas_worker.rollout.output_buffer import OutputBuffer


class BufferingScheduler(CountsWork, Scheduler):  # type: ignore[misc]
    """vLLM's scheduler for engines without asynchronous scheduling, as on a CPU, with counters.

    Sends at most two outputs per request instead of one per step: the first one, and all others joined (`OutputBuffer`).
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._outputs = OutputBuffer()

    def update_from_output(self, *arguments: Any, **options: Any) -> dict[int, Any]:
        """Return the message (vLLM's EngineCoreOutputs) for each client, by its index. Clients with nothing to receive are left out."""
        found: dict[int, Any] = super().update_from_output(*arguments, **options)
        for client, message in list(found.items()):
            message.outputs = self._outputs.pass_on(message.outputs)
            if not (message.outputs or message.finished_requests or message.scheduler_stats):
                del found[client]
        return found

    def finish_requests(self, request_ids: str | Iterable[str] | None, finished_status: Any) -> list[Any]:
        """Finish requests before their natural end, such as aborted ones, as vLLM does, and drop their buffered outputs."""
        finished: list[Any] = super().finish_requests(request_ids, finished_status)
        self._outputs.forget([request.request_id for request in finished])
        return finished


class CountingAsyncScheduler(CountsWork, AsyncScheduler):  # type: ignore[misc]
    """vLLM's scheduler for engines with asynchronous scheduling, as on a GPU, with the counters of `CountsWork`."""


def open_scheduler(*, vllm_config: Any, **options: Any) -> Scheduler:
    """Build the scheduler for an engine: CountingAsyncScheduler if vLLM's settings ask for asynchronous scheduling, else BufferingScheduler.

    options: vLLM's other arguments for its scheduler classes.
    """
    kind = CountingAsyncScheduler if vllm_config.scheduler_config.async_scheduling else BufferingScheduler
    return kind(vllm_config=vllm_config, **options)
