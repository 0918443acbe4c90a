"""What the door answers instead of a completion."""

from typing import Any

TURN_LIMIT = "turn_limit"


class RequestError(Exception):
    """A request that is not served; `code` is for machines, the text for people, `param` the field that is meant."""

    def __init__(self, text: str, *, param: str | None = None, status: int = 400, code: str = "unsupported") -> None:
        super().__init__(text)
        self.status = status
        self.code = code
        self.param = param

    @property
    def body(self) -> dict[str, Any]:
        """As clients expect errors."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}


def mentions_turn_limit(error: BaseException) -> bool:
    """Whether an exception is, wraps or follows the answer that the turns are used up; clients and frameworks dress it up."""
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
