"""Accelerator cards of this machine and their memory, by the driver's own command, without importing torch."""

import os
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass

_QUERY = ("nvidia-smi", "--query-gpu=index,uuid,memory.total,memory.free", "--format=csv,noheader,nounits")
_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Card:
    """One card. total: its memory in bytes. free: the bytes that no process uses now."""

    total: int
    free: int


def cards(query: Sequence[str] = _QUERY) -> tuple[Card, ...]:
    """Return the cards that processes started here may use (CUDA_VISIBLE_DEVICES); empty if they are not known, as with AMD's."""
    try:
        done = subprocess.run(query, capture_output=True, text=True, check=True, timeout=20.0)
        rows = [[value.strip() for value in line.split(",")] for line in done.stdout.splitlines() if line.strip()]
        found = [(index, uuid, Card(int(total) * _MIB, int(free) * _MIB)) for index, uuid, total, free in rows]
    except (OSError, subprocess.SubprocessError, ValueError):
        return ()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return tuple(card for *_, card in found)
    named = [name.strip() for name in visible.split(",")]
    return tuple(card for index, uuid, card in found if index in named or uuid in named)
