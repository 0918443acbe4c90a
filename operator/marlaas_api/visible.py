"""Text of others, to be shown and never obeyed: what a model or a tenant's code wrote may hold what a terminal acts on. Pure."""

import re

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")


def visible(text: str) -> str:
    """The text with control characters (but for newline and tab), and those that turn its direction, written out, as `\\x1b`."""
    return _CONTROL.sub(_written, text)


def _written(match: re.Match[str]) -> str:
    code = ord(match[0])
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"
