"""Routes episodes to replicas by rendezvous hashing: all replicas choose the same owner independently.

When a replica joins or leaves, only the episodes that it gains or loses move. Two replicas with different sets
may both generate a turn; then the first record of the turn counts (`record`).
"""

from collections.abc import Iterable
from hashlib import blake2b


def owner(episode: str, replicas: Iterable[str]) -> str:
    """Return the replica that generates this episode's turns. Raises ValueError if there are no replicas."""
    return max(replicas, key=lambda replica: (_weight(episode, replica), replica))


def _weight(episode: str, replica: str) -> bytes:
    return blake2b(f"{episode}/{replica}".encode(), digest_size=8).digest()
