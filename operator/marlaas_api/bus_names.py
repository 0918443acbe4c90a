"""What may be a subject, a key or a prefix on the bus; the gateway and its fake refuse alike. Pure."""

import re

from marlaas_api.bus import BusRefused

_TOKEN = r"[^\s.*>]+"
_SUBJECT = re.compile(rf"{_TOKEN}(\.{_TOKEN})*")
_KEY = re.compile(r"[-/_=a-zA-Z0-9]+(\.[-/_=a-zA-Z0-9]+)*")


def checked_subject(subject: str) -> str:
    """The subject, if a message can have it: no empty tokens, no wildcards. Raises BusRefused."""
    if not _SUBJECT.fullmatch(subject):
        raise BusRefused(f'cannot publish to "{subject}": not a subject')
    return subject


def checked_key(key: str) -> str:
    """The key, if a bucket can hold it. Raises BusRefused."""
    if not _KEY.fullmatch(key):
        raise BusRefused(f"not a key of a bucket: {key!r}")
    return key


def checked_prefix(prefix: str) -> str:
    """The prefix, if it is empty or whole tokens that end in a dot. Raises BusRefused."""
    if prefix and not (prefix.endswith(".") and _KEY.fullmatch(prefix[:-1])):
        raise BusRefused(f"not a prefix of whole tokens, ending in a dot: {prefix!r}")
    return prefix
