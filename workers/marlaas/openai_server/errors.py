"""Errors that the server returns instead of a completion."""

from typing import Any

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
