"""Faults of an episode: their class, their text, and whether the policy caused them."""

import signal

from marlaas_api.last_words import visible
from marlaas_api.messages import FaultClass
from marlaas_worker.sandbox.server import Ended

_MAX_TEXT = 10000
_BEGINNING = 1000


class Fault(Exception):
    """A fault of an episode, which then does not count.

    Attributes:
        fault: class of the fault.
        by_policy: a fault that the policy's tool call can cause. While a tool call is open, such a fault ends the episode with
            TOOL_ERROR instead, and the episode counts.
        is_permanent: every episode of the job would have this fault.
        is_retryable: another attempt at this episode may succeed; False if `is_permanent`.
    """

    def __init__(
        self,
        fault: FaultClass,
        text: str,
        by_policy: bool = False,
        *,
        is_permanent: bool = False,
        is_retryable: bool = True,
    ) -> None:
        super().__init__(text)
        self.fault = fault
        self.by_policy = by_policy
        self.is_permanent = is_permanent
        self.is_retryable = is_retryable and not is_permanent


def fault_of_exit(ended: Ended, memory: str) -> Fault:
    """Return the fault of a child that ended without a score. memory: `environment.memory` of the manifest, for the fault's text."""
    if ended.cause == "memory":
        text = f"out of memory: the environment used more than {memory} (environment.memory)"
        return Fault(FaultClass.ENV, text, by_policy=True)
    if ended.cause == "processes":
        return Fault(FaultClass.ENV, "the environment started too many processes", by_policy=True)
    if ended.cause == "order":
        return Fault(FaultClass.ENV, "the environment closed its connection to the supervisor", by_policy=True)
    if ended.status is None:
        return Fault(FaultClass.INFRA, f"the sandbox lost the process of the episode: {ended.cause}")
    if ended.status == -signal.SIGKILL:
        text = "the environment was killed (SIGKILL), perhaps because the machine ran out of memory"
        return Fault(FaultClass.ENV, text)
    if ended.status < 0:
        text = f"the environment was ended by {signal.Signals(-ended.status).name}"
        return Fault(FaultClass.ENV, text, by_policy=True)
    text = f"the environment ended with exit status {ended.status} before it returned a reward"
    return Fault(FaultClass.ENV, text, by_policy=True)


def bounded(text: str) -> str:
    """Return a text of the environment with control characters escaped. Of a long text, the middle is cut out; `_MAX_TEXT` characters stay.

    The text is shown in statuses, and so in terminals of people of other namespaces, where control characters would act.
    """
    text = visible(text)
    if len(text) <= _MAX_TEXT:
        return text
    return f"{text[:_BEGINNING]}\n[…]\n{text[-(_MAX_TEXT - _BEGINNING) :]}"
