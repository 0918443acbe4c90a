"""Extract the answer from a reply: pure functions from text to the answer's text; None if the reply has none.

Independent of data sets. Answers are extracted before they are compared, so that a long but right reply counts as
right.
"""

import re
from collections.abc import Callable

from marlaas.envs.loading import nearest
from marlaas_api.errors import InvalidInput

Extract = Callable[[str], str | None]
_NUMBER = re.compile(r"(?<!\d)-?\d[\d,]*(?:\.\d+)?")
_TAG = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_PROGRAM = re.compile(r"```[ \t]*(?:python3?|py)[ \t]*\n(.*?)```|<python>(.*?)</python>", re.DOTALL | re.IGNORECASE)
_BOXED = "\\boxed{"


def extractor(kind: str, pattern: str | None = None) -> Extract:
    """Return the extractor of this name. Raises InvalidInput.

    `pattern` is for `regex` only: the answer is its first group, or the whole match if it has no group.
    """
    if kind == "regex":
        return _regex(pattern)
    if pattern is not None:
        raise InvalidInput(f"`pattern` applies only to answer: regex, not to answer: {kind}")
    try:
        return _EXTRACTORS[kind]
    except KeyError:
        hint = nearest(kind, [*_EXTRACTORS, "regex"])
        raise InvalidInput(f"answer is {kind!r}{hint}; expected one of {', '.join(_EXTRACTORS)}, regex") from None


def last_number(reply: str) -> str | None:
    """Return the last number, without thousands separators and without a decimal part of zero."""
    found = _NUMBER.findall(reply)
    return re.sub(r"\.0+$", "", found[-1].replace(",", "")) if found else None


def boxed(reply: str) -> str | None:
    r"""Return the content of the last `\boxed{…}`; braces inside must match."""
    start = reply.rfind(_BOXED)
    depth = 1
    for at in range(start + len(_BOXED), len(reply) if start >= 0 else 0):
        depth += {"{": 1, "}": -1}.get(reply[at], 0)
        if depth == 0:
            return reply[start + len(_BOXED) : at].strip()
    return None


def tag(reply: str) -> str | None:
    """Return the content of the last `<answer>…</answer>`."""
    found = _TAG.findall(reply)
    return found[-1].strip() if found else None


def whole(reply: str) -> str | None:
    """Return the reply stripped of white space."""
    return reply.strip() or None


def program(reply: str) -> str | None:
    """Return the last complete Python program: a fenced block marked as python, or `<python>…</python>`."""
    found = _PROGRAM.findall(reply)
    return "".join(found[-1]).strip("\n") if found else None


def _regex(pattern: str | None) -> Extract:
    if pattern is None:
        raise InvalidInput("answer: regex needs the argument 'pattern'")
    try:
        compiled = re.compile(pattern, re.DOTALL)
    except re.error as error:
        raise InvalidInput(f"pattern {pattern!r} is not a regular expression: {error}") from error

    def extract(reply: str) -> str | None:
        found = list(compiled.finditer(reply))
        return str(found[-1][1 if compiled.groups else 0] or "").strip() or None if found else None

    return extract


_EXTRACTORS: dict[str, Extract] = {"last_number": last_number, "boxed": boxed, "tag": tag, "whole": whole}
