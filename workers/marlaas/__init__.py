"""Package for users: the `marlaas` command, the environment SDK (exported here) and the local runner."""

from marlaas.environment import Agent as Agent
from marlaas.environment import Agents as Agents
from marlaas.environment import Candidate as Candidate
from marlaas.environment import Message as Message
from marlaas.environment import Reply as Reply
from marlaas.environment import Rows as Rows
from marlaas.environment import Score as Score
from marlaas.environment import Split as Split
from marlaas.environment import StopReason as StopReason
from marlaas.environment import Task as Task
from marlaas.environment import ToolCall as ToolCall
from marlaas.environment import ToolError as ToolError
from marlaas.environment import TurnLimit as TurnLimit
