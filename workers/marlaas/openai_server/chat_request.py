"""Parse and check a chat-completions request: messages, tools and limits; and the errors that the server returns instead of a completion.

The job determines sampling. A field that would change the sampled distribution, so that training could not
reproduce it, is rejected with a reason. So is an unknown field: nothing is ignored silently.
"""

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from marlaas.chat_messages import read_message, tool_text
from marlaas.environment_types import InvalidTurn, Message
from marlaas_api.names import MAX_STOP_TEXT, MAX_STOPS

TURN_LIMIT = "turn_limit"


class RequestError(Exception):
    """A rejected request. `code` is for programs, the text for people; `param` names the field concerned."""

    def __init__(self, text: str, *, param: str | None = None, status: int = 400, code: str = "unsupported") -> None:
        super().__init__(text)
        self.status = status
        self.code = code
        self.param = param

    @property
    def body(self) -> dict[str, Any]:
        """The error in the API's JSON format."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}


def mentions_turn_limit(error: BaseException) -> bool:
    """Return whether an exception is, wraps or follows the server's turn-limit error, which clients and frameworks often wrap."""
    seen: set[int] = set()
    waiting: list[BaseException | None] = [error]
    while waiting:
        one = waiting.pop()
        if one is None or id(one) in seen:
            continue
        seen.add(id(one))
        if TURN_LIMIT in str(one):
            return True
        waiting += [one.__cause__, one.__context__]
        if isinstance(one, BaseExceptionGroup):
            waiting += one.exceptions
    return False


MAX_CHOICES = 128
_TEXT: dict[str, Any] = {"type": "text"}
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "top_p": (1,),
    "top_k": (-1, 0),
    "min_p": (0,),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "logit_bias": ({},),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "best_of": (1,),
    "modalities": (["text"],),
    "response_format": (_TEXT,),
    "parallel_tool_calls": (True,),
    "tool_choice": ("auto", "none"),
    "functions": ([],),
    "function_call": ("auto", "none"),
}
"""Sampling fields, each with the values that have no effect."""
_OTHER_DISTRIBUTION = "it would sample from another distribution than the policy that is trained"
_NO_LOGPROBS = "the rollout role keeps logprobs for training, and an environment never receives them; remove the field"
_ONE_FORM = "a grammar would sample from another distribution than the policy that is trained; check the form in the environment"
_OLD_CALLS = "functions have become tools; send `tools` and `tool_choice`"
_REASONS = {
    "logprobs": _NO_LOGPROBS,
    "top_logprobs": _NO_LOGPROBS,
    "best_of": "each choice is a turn that is trained; ask for `n` choices",
    "modalities": "the models write text only",
    "response_format": _ONE_FORM,
    "tool_choice": "a call cannot be forced without another distribution than the policy that is trained; send auto or none",
    "parallel_tool_calls": "the number of calls in a reply is the policy's choice; remove the field",
    "functions": _OLD_CALLS,
    "function_call": _OLD_CALLS,
}
"""Why other values of fields are refused, unless it is `_OTHER_DISTRIBUTION`."""
_IRRELEVANT = {
    *("metadata", "prompt_cache_key", "prompt_cache_retention", "safety_identifier", "seed", "service_tier", "store"),
    "user",
}
"""Ignored fields, which do not affect sampling. The job determines seeds."""
_SERVED = {
    *(
        "add_generation_prompt",
        "continue_final_message",
        "max_completion_tokens",
        "max_tokens",
        "messages",
        "model",
        "n",
        "stop",
        "stream",
        "stream_options",
        "temperature",
    ),
    "tools",
}


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """One request. `tools` holds their JSON texts; `calls`: whether tool calls are parsed from the reply."""

    model: str
    messages: tuple[Message, ...]
    tools: tuple[str, ...] = ()
    calls: bool = False
    num_choices: int = 1
    max_tokens: int | None = None
    streams: bool = False
    streams_usage: bool = False
    stop: tuple[str, ...] = ()


def read(body: object, temperature: float) -> ChatRequest:
    """Check a request's body. `temperature` is the job's. Raises RequestError."""
    if not isinstance(body, dict):
        raise RequestError("the request body must be a JSON object")
    fields = {name: value for name, value in body.items() if value is not None}
    _check_sampling(fields, temperature)
    tools = _tools(fields.get("tools", []))
    messages = _messages(fields.get("messages"))
    _check_continuation(fields, messages[-1])
    return ChatRequest(
        model=_text(fields.get("model"), "model"),
        messages=messages,
        tools=tools,
        calls=bool(tools) and fields.get("tool_choice") != "none",
        num_choices=_count(fields, "n", MAX_CHOICES) or 1,
        max_tokens=_count(fields, "max_completion_tokens") or _count(fields, "max_tokens"),
        streams=bool(fields.get("stream", False)),
        streams_usage=_streams_usage(fields.get("stream_options", {})),
        stop=_stop(fields.get("stop", ())),
    )


def _stop(given: Any) -> tuple[str, ...]:
    found = (given,) if isinstance(given, str) and given else given or ()
    is_list = isinstance(found, list | tuple) and len(found) <= MAX_STOPS
    if not is_list or not all(isinstance(one, str) and 1 <= len(one) <= MAX_STOP_TEXT for one in found):
        raise _refused("stop", given, f"expected at most {MAX_STOPS} strings of 1 to {MAX_STOP_TEXT} characters")
    return tuple(found)


def _check_sampling(fields: Mapping[str, Any], temperature: float) -> None:
    asked = fields.get("temperature", temperature)
    if asked != temperature:
        raise _refused(
            "temperature", asked, f"the job samples at {temperature:g} (rollout.temperature); remove the field"
        )
    for name, value in fields.items():
        if name in _NEUTRAL and value not in _NEUTRAL[name]:
            raise _refused(name, value, _REASONS.get(name, _OTHER_DISTRIBUTION))
        if name not in _NEUTRAL and name not in _SERVED and name not in _IRRELEVANT:
            raise RequestError(f"unknown field {name!r}; remove it", param=name)


def _check_continuation(fields: Mapping[str, Any], last: Message) -> None:
    """Refuse what contradicts the messages: an assistant's message at the end is always continued, and no other one."""
    continues = last.role == "assistant"
    if continues and last.tool_calls:
        raise RequestError("the last message has tool calls, and a reply cannot continue it", param="messages")
    for name, right in (("continue_final_message", continues), ("add_generation_prompt", not continues)):
        if fields.get(name, right) != right:
            why = f"the reply {'continues' if continues else 'begins after'} the last message; remove the field"
            raise _refused(name, fields[name], why)


def _refused(name: str, value: object, why: str) -> RequestError:
    return RequestError(f"{name} = {value!r:.80} is not supported: {why}", param=name)


def _streams_usage(options: object) -> bool:
    if not isinstance(options, dict):
        raise RequestError("stream_options must be an object", param="stream_options")
    return bool(options.get("include_usage", False))


def _count(fields: Mapping[str, Any], name: str, most: int | None = None) -> int | None:
    value = fields.get(name)
    if value is None:
        return None
    if type(value) is not int or value < 1 or (most is not None and value > most):
        bounds = "1 or more" if most is None else f"1 to {most}"
        raise RequestError(f"{name} is {value!r:.80}; expected {bounds}", param=name)
    return value


def _tools(given: object) -> tuple[str, ...]:
    if not isinstance(given, list):
        raise RequestError("tools must be a list", param="tools")
    return tuple(_tool(one) for one in given)


def _tool(given: Any) -> str:
    if not isinstance(given, dict) or given.get("type") != "function":
        raise RequestError('a tool must be {"type": "function", "function": {"name": …}}', param="tools")
    with _as_request_error("tools"):
        return tool_text(given)


def _messages(given: object) -> tuple[Message, ...]:
    if not isinstance(given, list) or not given:
        raise RequestError("messages must be a list of at least one message", param="messages")
    return tuple(_message(one, f"messages[{number}]") for number, one in enumerate(given))


def _message(given: object, where: str) -> Message:
    with _as_request_error(where):
        return read_message(given, where)


@contextlib.contextmanager
def _as_request_error(where: str) -> Iterator[None]:
    try:
        yield
    except InvalidTurn as error:
        raise RequestError(str(error), param=where) from None


def _text(given: object, where: str) -> str:
    if not isinstance(given, str):
        raise RequestError(f"{where} must be text", param=where)
    return given
