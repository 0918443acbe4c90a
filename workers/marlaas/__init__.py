"""Package for users: the `marlaas` command, the environment SDK (exported here) and the local runner."""

import typing

from marlaas.environment import Agent as Agent
from marlaas.environment import Agents as Agents
from marlaas.environment import Candidate as Candidate
from marlaas.environment import Message as Message
from marlaas.environment import Play as Play
from marlaas.environment import Reply as Reply
from marlaas.environment import Rows as Rows
from marlaas.environment import Score as Score
from marlaas.environment import ServiceFailed as ServiceFailed
from marlaas.environment import Split as Split
from marlaas.environment import StopReason as StopReason
from marlaas.environment import Task as Task
from marlaas.environment import ToolCall as ToolCall
from marlaas.environment import ToolError as ToolError
from marlaas.environment import TurnLimit as TurnLimit

if typing.TYPE_CHECKING:
    from marlaas.clusters import Cluster as Cluster
    from marlaas.runs import Run as Run

_LATE = {"Run": "marlaas.runs", "Cluster": "marlaas.clusters"}


def __getattr__(name: str) -> object:
    """Import `Run` and `Cluster` when they are asked for: environments must not import the local runner."""
    if name in _LATE:
        from importlib import import_module

        return getattr(import_module(_LATE[name]), name)
    raise AttributeError(f"module 'marlaas' has no attribute {name!r}")
