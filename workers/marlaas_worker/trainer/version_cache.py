"""Committed versions of this trainer's agents in host memory, from which parked agents are restored. Pure.

It is for models on an accelerator: without one, the agents' memory is host memory itself, and the blob store is the next place.
"""

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from torch import Tensor

from marlaas_api.blobs import BlobRef
from marlaas_worker.trainer.optimizer import TrainingState


@dataclass(frozen=True, slots=True, eq=False)
class CachedVersion:
    """A version's weights and training state in host memory; never changed. manifest: of the version, which identifies it."""

    manifest: BlobRef
    weights: Mapping[str, Tensor]
    state: TrainingState

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self._tensors())

    def _tensors(self) -> Iterator[Tensor]:
        for tensors in (self.weights, self.state.first_moments, self.state.second_moments, self.state.initial):
            yield from tensors.values()


class VersionCache:
    """The newest version of each agent, by policy key. Beyond max_bytes, the least recently used ones are dropped; 0 keeps none."""

    def __init__(self, max_bytes: int = 0) -> None:
        self.max_bytes = max_bytes
        self._versions: OrderedDict[str, CachedVersion] = OrderedDict()
        self._num_bytes = 0

    def keep(self, agent: str, version: CachedVersion) -> None:
        """Replace an agent's version."""
        self.drop(agent)
        if version.num_bytes > self.max_bytes:
            return
        self._versions[agent] = version
        self._num_bytes += version.num_bytes
        while self._num_bytes > self.max_bytes:
            self.drop(next(iter(self._versions)))

    def find(self, agent: str, manifest: BlobRef) -> CachedVersion | None:
        """Return an agent's version; None if it is not the one with this manifest, or was dropped."""
        found = self._versions.get(agent)
        if found is None or found.manifest != manifest:
            return None
        self._versions.move_to_end(agent)
        return found

    def drop(self, agent: str) -> None:
        """Drop an agent's version. May be repeated."""
        found = self._versions.pop(agent, None)
        if found is not None:
            self._num_bytes -= found.num_bytes
