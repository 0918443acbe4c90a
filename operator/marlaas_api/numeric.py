"""Numbers that manifests and documents share: the range of integers, quantities such as 512Mi, and adapter slots."""

LARGEST_INTEGER = 2**53 - 1
"""The largest integer that every JSON reader keeps exactly."""

QUANTITY = r"^[0-9]+(\.[0-9]+)?(m|k|M|G|T|Ki|Mi|Gi|Ti)?$"
"""Pattern of the text that `quantity` parses."""

_SUFFIXES = {
    "": 1,
    "m": 1e-3,
    "k": 1e3,
    "M": 1e6,
    "G": 1e9,
    "T": 1e12,
    "Ki": 2**10,
    "Mi": 2**20,
    "Gi": 2**30,
    "Ti": 2**40,
}


def quantity(text: str) -> float:
    """Parse a Kubernetes quantity: bytes for memory, cores for CPU."""
    digits = text.rstrip("mkMGTi")
    return float(digits) * _SUFFIXES[text[len(digits) :]]


TRAINED_COPIES = 4
"""Copies of an adapter in a trainer's memory: weights, gradient, two moments."""


def trained_bytes(rank: int, num_copies: int, bytes_per_rank: int) -> int:
    """Return the trainer memory of an agent. bytes_per_rank: of `TRAINED_COPIES`, for each unit of rank."""
    return -(-rank * bytes_per_rank * num_copies // TRAINED_COPIES)


def slots_needed(num_agents: int, max_staleness: int) -> int:
    """Return the number of adapter versions that a job uses at once.

    Per agent: the newest version, up to `max_staleness` older ones, and one in evaluation.
    """
    return num_agents * (max_staleness + 2)
