"""Versions in host memory: the newest of each agent, within a bound, and only the very version that is asked for."""

import torch

from marlaas_api.blobs import BlobRef
from marlaas_worker.trainer.optimizer import TrainingState
from marlaas_worker.trainer.version_cache import CachedVersion, VersionCache


def ref(name: str) -> BlobRef:
    return BlobRef(name=name, sha256=name[-1] * 64, size_bytes=1)


def version(name: str, num: int = 1) -> CachedVersion:
    """A version of 16 bytes for each number."""
    tensors = {"w": torch.zeros(num)}
    return CachedVersion(
        ref(name), tensors, TrainingState(first_moments=tensors, second_moments=tensors, initial=tensors)
    )


def test_a_version_is_found_by_its_manifest_only() -> None:
    cache = VersionCache(100)
    cache.keep("agent", first := version("v1"))
    assert cache.find("agent", ref("v1")) is first
    assert cache.find("agent", ref("v2")) is None
    assert cache.find("other", ref("v1")) is None
    cache.keep("agent", second := version("v2"))
    assert (cache.find("agent", ref("v1")), cache.find("agent", ref("v2"))) == (None, second)


def test_the_least_recently_used_one_is_dropped_first() -> None:
    cache = VersionCache(48)
    for name in "abc":
        cache.keep(name, version(name))
    assert cache.find("a", ref("a")) is not None
    cache.keep("d", version("d"))
    assert [name for name in "abcd" if cache.find(name, ref(name))] == ["a", "c", "d"]
    cache.keep("e", version("e", 2))
    assert [name for name in "acde" if cache.find(name, ref(name))] == ["d", "e"]


def test_a_version_that_is_larger_than_the_bound_drops_only_the_earlier_one_of_its_agent() -> None:
    cache = VersionCache(48)
    for name in "ab":
        cache.keep(name, version(name))
    cache.keep("a", version("large", 4))
    assert cache.find("a", ref("a")) is cache.find("a", ref("large")) is None
    assert cache.find("b", ref("b")) is not None
    for name in "cd":
        cache.keep(name, version(name))
    assert cache.find("b", ref("b")) is not None, "the dropped bytes are free again"


def test_a_bound_of_zero_keeps_none_and_dropping_may_be_repeated() -> None:
    cache = VersionCache()
    cache.keep("a", version("a", 3))
    assert version("a", 3).num_bytes == 4 * 4 * 3, "all tensors count"
    assert cache.find("a", ref("a")) is None
    cache.drop("a")
