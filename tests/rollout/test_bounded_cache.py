"""Caches of the rollout role are bounded in bytes, and by what lives."""

from marlaas_worker.rollout.bounded_cache import BoundedCache


def test_the_least_recently_used_values_are_evicted_beyond_the_bytes() -> None:
    cache: BoundedCache[int] = BoundedCache(100)
    for key, num_bytes in (("a", 40), ("b", 30), ("c", 30)):
        cache.put(key, num_bytes, num_bytes)
    assert (cache.get("a"), cache.num_bytes) == (40, 100)
    cache.put("d", 50, 50)
    assert [key in cache for key in "abcd"] == [True, False, False, True]
    assert cache.get("b") is None
    assert cache.num_bytes == 90


def test_a_new_value_of_a_key_replaces_the_old_one() -> None:
    cache: BoundedCache[str] = BoundedCache(100)
    cache.put("a", "old", 60)
    cache.put("a", "new", 70)
    assert (cache.get("a"), cache.num_bytes, len(cache)) == ("new", 70, 1)


def test_one_value_is_kept_even_if_it_is_larger_than_the_bound() -> None:
    cache: BoundedCache[int] = BoundedCache(10)
    cache.put("small", 1, 5)
    cache.put("large", 2, 500)
    assert (cache.get("small"), cache.get("large"), cache.num_bytes) == (None, 2, 500)


def test_values_of_what_is_gone_give_their_bytes_back() -> None:
    cache: BoundedCache[int] = BoundedCache(100)
    for number in range(4):
        cache.put(f"job-{number}", number, 10)
    cache.forget(lambda key, value: value % 2 == 1 or key == "job-0")
    assert ([key in cache for key in ("job-0", "job-1", "job-2")], cache.num_bytes) == ([False, False, True], 10)
