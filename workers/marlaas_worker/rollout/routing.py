"""Which replica owns an episode: rendezvous hashing, so that every replica names the same one without asking anybody.

When a replica comes or goes, only the episodes that it gains or loses move. Two replicas that see different sets may both
generate a turn; the record of the turn decides (`record`).
"""

from collections.abc import Iterable
from hashlib import blake2b


def owner(episode: str, replicas: Iterable[str]) -> str:
    """Name of the replica that generates this episode's turns. Raises ValueError if there are no replicas."""
    return max(replicas, key=lambda replica: (_weight(episode, replica), replica))


def _weight(episode: str, replica: str) -> bytes:
    return blake2b(f"{episode}/{replica}".encode(), digest_size=8).digest()
