"""Address ranges as network policies need them: what a list of ranges opens, and which part of it another range opens.

Two ranges nest or are disjoint, so a part is the smaller range, and what is closed within is an exception of it.
"""

import ipaddress
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from marlaas_api.kinds.environment import CLOSED_RANGES

PUBLIC = "public"
"""Name of all addresses outside the installation's closed ranges."""
_EVERYWHERE = ("0.0.0.0/0", "::/0")

Network = ipaddress.IPv4Network | ipaddress.IPv6Network


@dataclass(frozen=True, slots=True)
class Block:
    """An open address range. holes: closed ranges within it."""

    network: Network
    holes: tuple[Network, ...] = ()


def opened(ranges: Iterable[str], closed: Sequence[str]) -> Iterator[Block]:
    """Yield what a list of ranges opens, each a CIDR or `PUBLIC`.

    Closed ranges within a listed range stay closed. A listed range within a closed one is open, because it is the
    more specific setting; only `CLOSED_RANGES` are never open.
    """
    shut = [*map(_network, closed), *CLOSED_RANGES]
    for text in ranges:
        for network in map(_network, _EVERYWHERE if text == PUBLIC else (text,)):
            if not any(contains(never, network) for never in CLOSED_RANGES):
                yield Block(network, _outermost(hole for hole in shut if hole != network and contains(network, hole)))


def part(block: Block, wanted: str) -> Block | None:
    """Return the part of a block that lies within a range; None if there is none."""
    network = _network(wanted)
    inner = network if contains(block.network, network) else block.network
    if not contains(network, inner) or any(contains(hole, inner) for hole in block.holes):
        return None
    return Block(inner, tuple(hole for hole in block.holes if contains(inner, hole)))


def contains(network: Network, other: Network) -> bool:
    """Return whether a range contains the whole of another one."""
    return (
        network.version == other.version and network.prefixlen <= other.prefixlen and other.network_address in network
    )


def _network(text: str) -> Network:
    return ipaddress.ip_network(text, strict=False)


def _outermost(networks: Iterable[Network]) -> tuple[Network, ...]:
    """Return the ranges that lie in no other one, each once."""
    distinct = dict.fromkeys(networks)
    return tuple(one for one in distinct if not any(one != other and contains(other, one) for other in distinct))
