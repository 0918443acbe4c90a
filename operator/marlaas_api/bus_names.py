"""Validation of subjects, keys and prefixes, shared by the bus gateway and its fake. Pure."""

import re

from marlaas_api.bus import BusRefused

_TOKEN = r"[^\s.*>]+"
_SUBJECT = re.compile(rf"{_TOKEN}(\.{_TOKEN})*")
_KEY = re.compile(r"[-/_=a-zA-Z0-9]+(\.[-/_=a-zA-Z0-9]+)*")


def checked_subject(subject: str) -> str:
    """Return the subject if a message can be published to it: no empty tokens, no wildcards. Raises BusRefused."""
    if not _SUBJECT.fullmatch(subject):
        raise BusRefused(f'cannot publish to "{subject}": not a subject')
    return subject


def checked_key(key: str) -> str:
    """Return the key if a bucket accepts it. Raises BusRefused."""
    if not _KEY.fullmatch(key):
        raise BusRefused(f"not a key of a bucket: {key!r}")
    return key


def checked_prefix(prefix: str) -> str:
    """Return the prefix if it is empty, or consists of whole tokens and ends in a dot. Raises BusRefused."""
    if prefix and not (prefix.endswith(".") and _KEY.fullmatch(prefix[:-1])):
        raise BusRefused(f"not a prefix of whole tokens, ending in a dot: {prefix!r}")
    return prefix
