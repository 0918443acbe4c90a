"""Caches with a bound in bytes, for values that can be read again from the bus or the blob store, or are not needed for long."""

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any, Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class CacheBound:
    """Bound of the bytes that several caches hold together. Above it, the least recently used values of all these caches are evicted.

    The newest value is kept whatever its size. max_bytes: the bound. num_bytes: sum of the callers' estimates for all values.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self._order: OrderedDict[tuple[BoundedCache[Any, Any], Hashable], int] = OrderedDict()

    def use(self, cache: "BoundedCache[K, V]", key: K) -> None:
        """Mark a value as the most recently used one. key: of the value in `cache`."""
        self._order.move_to_end((cache, key))

    def add(self, cache: "BoundedCache[K, V]", key: K, num_bytes: int) -> None:
        """Add the bytes of a new value, and evict the least recently used values of all caches while the sum is above the bound.

        key: of the new value in `cache`. num_bytes: estimated bytes of key and value.
        """
        self._order[cache, key] = num_bytes
        self.num_bytes += num_bytes
        while self.num_bytes > self.max_bytes and len(self._order) > 1:
            self._evict()

    def remove(self, cache: "BoundedCache[K, V]", key: K) -> None:
        """Subtract the bytes of a value that its cache has dropped."""
        self.num_bytes -= self._order.pop((cache, key))

    def trim(self, is_old: Callable[[Any], bool]) -> None:
        """Evict values, the least recently used first, until `is_old` returns False. is_old: called with the next value to evict."""
        while self._order and is_old(self._oldest()):
            self._evict()

    def _oldest(self) -> object:
        cache, key = next(iter(self._order))
        return cache[key]

    def _evict(self) -> None:
        cache, key = next(iter(self._order))
        cache.drop(key)


class BoundedCache(Generic[K, V]):
    """Cache of values by key. `get` marks a value as used. bound: limits the bytes of this cache and of the others that share it."""

    def __init__(self, bound: CacheBound) -> None:
        self._bound = bound
        self._values: dict[K, V] = {}

    def __len__(self) -> int:
        return len(self._values)

    def __contains__(self, key: K) -> bool:
        return key in self._values

    def __getitem__(self, key: K) -> V:
        return self._values[key]

    def get(self, key: K) -> V | None:
        """Return a value, and mark it as the most recently used one; None if it is not cached."""
        if key not in self._values:
            return None
        self._bound.use(self, key)
        return self._values[key]

    def put(self, key: K, value: V, num_bytes: int) -> None:
        """Cache a value, in place of an earlier one of the same key. num_bytes: estimate for key and value."""
        self.drop(key)
        self._values[key] = value
        self._bound.add(self, key, num_bytes)

    def drop(self, key: K) -> None:
        """Drop a value, if it is cached."""
        if key in self._values:
            del self._values[key]
            self._bound.remove(self, key)

    def clear(self) -> None:
        """Drop all values."""
        for key in list(self._values):
            self.drop(key)
