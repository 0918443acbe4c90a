"""A cache that is bounded in bytes, for what can be read again from the bus or the store."""

from collections import OrderedDict
from collections.abc import Callable
from typing import Generic, TypeVar

V = TypeVar("V")


class BoundedCache(Generic[V]):
    """Values by key; the least recently used ones are evicted beyond `max_bytes`. The last one is kept whatever its size.

    num_bytes: of all values, by the estimates that the caller gives.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._kept: OrderedDict[str, tuple[V, int]] = OrderedDict()
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._kept)

    def __contains__(self, key: str) -> bool:
        return key in self._kept

    def get(self, key: str) -> V | None:
        """Return a value, and note its use; None if it is not cached."""
        found = self._kept.get(key)
        if found is None:
            return None
        self._kept.move_to_end(key)
        return found[0]

    def put(self, key: str, value: V, num_bytes: int) -> None:
        """Cache a value, in place of an earlier one of the same key. num_bytes: estimate for key and value."""
        self.drop(key)
        self._kept[key] = value, num_bytes
        self.num_bytes += num_bytes
        while self.num_bytes > self._max_bytes and len(self._kept) > 1:
            self.drop(next(iter(self._kept)))

    def drop(self, key: str) -> None:
        """Drop a value, if it is cached."""
        self.num_bytes -= self._kept.pop(key, (None, 0))[1]

    def forget(self, is_gone: Callable[[str, V], bool]) -> None:
        """Drop the values for which `is_gone` is true."""
        for key in [key for key, (value, _) in self._kept.items() if is_gone(key, value)]:
            self.drop(key)
