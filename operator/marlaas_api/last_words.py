"""Text from outside, for messages to people: escaping of control characters, and the error that ended a role as one sentence. Pure.

A log holds our own records (`<time> <LEVEL> <name> <logger>: <text>`, followed by an indented traceback) and the output
of libraries. An engine logs its own error long before the "engine core initialization failed" that the role gets.
Therefore the first specific error is preferred to the last error.
"""

import re

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")


def visible(text: str) -> str:
    """Escape control characters, except newline and tab, and bidirectional marks, in the form of `\\x1b`."""
    return _CONTROL.sub(_written, text)


def _written(match: re.Match[str]) -> str:
    code = ord(match[0])
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"


START_MARK = "=== start"
"""Prefix of the line that the runner writes into a log before each start of the role."""

_EXCEPTION = re.compile(
    r"(?P<type>(?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception|Interrupt|Refused|Unavailable|Input)): (?P<text>\S.*)$"
)
_OUR_CRASH = re.compile(r"^\S+ CRITICAL \S+ \S+: (?P<text>.+)$")
_RECORD = re.compile(r"^\S+Z [A-Z]+ \S+ \S+: ")
_WRAPPERS = (
    "Engine core initialization failed",
    "EngineCore failed to start",
    "See root cause above",
    "WorkerProc failed",
)
_PREFIX = re.compile(r"^\s*(?:\|\s*)?(?:\([^)]*pid=\d+\)\s*)?(?:ERROR \S+ \S+ \[[^\]]*\]\s*)?")
MAX_CHARS = 600


def last_words(log: str) -> str:
    """Return the error that ended the last process in this log, or its last lines if it logged no error."""
    lines = _last_life(log)
    crash = next((match["text"] for line in reversed(lines) if (match := _OUR_CRASH.match(line))), "")
    if crash and not _is_wrapper(crash):
        return crash[:MAX_CHARS]
    cause = next((text for line in lines if (text := _exception(line)) and not _is_wrapper(text)), "")
    return (cause or crash or _tail(lines))[:MAX_CHARS]


def last_line(log: str) -> str:
    """Return the text of the last line that the last process in this log wrote; empty if it wrote none."""
    lines = _last_life(log)
    return _RECORD.sub("", _PREFIX.sub("", lines[-1])).strip()[:MAX_CHARS] if lines else ""


def error_sentence(text: str) -> str:
    """Return the line of an error's text that says what happened: of a traceback its exception's, otherwise the first one."""
    lines = [line for line in text.splitlines() if line.strip()]
    last_frame = max((at for at, line in enumerate(lines) if line.startswith('  File "')), default=-1)
    return next((line for line in lines[last_frame + 1 :] if not line.startswith(" ")), "").strip()


def _last_life(log: str) -> list[str]:
    _, mark, rest = log.rpartition(START_MARK)
    return [line for line in rest.splitlines()[1 if mark else 0 :] if line.strip()]


def _exception(line: str) -> str:
    match = _EXCEPTION.match(_PREFIX.sub("", line))
    return f"{match['type'].rpartition('.')[2]}: {match['text']}" if match else ""


def _is_wrapper(text: str) -> bool:
    return any(wrapper in text for wrapper in _WRAPPERS)


def _tail(lines: list[str]) -> str:
    return " / ".join(_PREFIX.sub("", line).strip() for line in lines[-3:]) or "it left nothing in its log"
