"""Parse YAML to plain values, with the line number of each value.

Scalars are parsed as Kubernetes parses them (`3e-4` is a number, `010` is eight, a date is text), so that a
manifest means the same here and on a cluster. Duplicate keys, which most parsers silently overwrite, are errors.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import yaml

from marlaas_api.errors import InvalidInput

Loc = tuple[str | int, ...]

_MAX_VALUES = 100_000
_MAX_DEPTH = 100
_LARGEST = 2**63
_NULL, _BOOL, _INT, _FLOAT, _STR = (f"tag:yaml.org,2002:{name}" for name in ("null", "bool", "int", "float", "str"))
_LIST, _MAPPING = ("tag:yaml.org,2002:seq", "tag:yaml.org,2002:map")
_MERGE = "tag:yaml.org,2002:merge"
_HINTS = {
    r"'\t'": "; indent with spaces, not tabs",
    "mapping values are not allowed": "; check the indentation here and above, and the space after every colon",
    "could not find expected ':'": "; check the space after every colon",
    "expected <block end>": "; check the indentation here and above",
}
"""Hints about the usual cause, by a part of the parser's error text."""
_TRUE = frozenset({"y", "yes", "true", "on"})
_RESOLVERS = (
    (_BOOL, r"^(?:y|Y|yes|Yes|YES|n|N|no|No|NO|true|True|TRUE|false|False|FALSE|on|On|ON|off|Off|OFF)$", "yYnNtTfFoO"),
    (_INT, r"^[-+]?(?:0b[01_]+|0o[0-7_]+|0x[0-9a-fA-F_]+|0[0-7_]*|[1-9][0-9_]*)$", "-+0123456789"),
    (
        _FLOAT,
        r"^(?:[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$",
        "-+0123456789.",
    ),
    (_NULL, r"^(?:~|null|Null|NULL|)$", ["~", "n", "N", ""]),
    (_MERGE, r"^<<$", "<"),
)


class _Loader(yaml.SafeLoader):
    """YAML loader that resolves plain scalars by `_RESOLVERS` only."""


_Loader.yaml_implicit_resolvers = {}  # the base class's resolvers differ from those of Kubernetes
for _tag, _pattern, _first in _RESOLVERS:
    _Loader.add_implicit_resolver(_tag, re.compile(_pattern), list(_first))


_SURROGATES = re.compile(r"(?<!\\)((?:\\\\)*)\\u([dD][89abAB][0-9a-fA-F]{2})\\u([dD][c-fC-F][0-9a-fA-F]{2})")
"""A pair of surrogates in JSON: one character beyond U+FFFF."""


def _as_yaml(text: str) -> str:
    """Return a text that YAML parses as JSON parses it, if it is JSON; else the text. Lines stay the same.

    JSON may be indented with tabs, and has a pair of `\\u` escapes for one character beyond U+FFFF.
    """
    if not text.lstrip().startswith(("{", "[")):
        return text
    try:
        json.loads(text)
    except ValueError:
        return text
    return _SURROGATES.sub(_joined, text).replace("\t", " ")  # a tab is never part of a JSON string


def _joined(found: re.Match[str]) -> str:
    high, low = int(found[2], 16), int(found[3], 16)
    return found[1] + chr(0x10000 + ((high - 0xD800) << 10) + (low - 0xDC00))


class YamlError(InvalidInput):
    """The text is not valid YAML for a manifest. `line` counts from 1."""

    def __init__(self, line: int, text: str) -> None:
        super().__init__(text)
        self.line = line


@dataclass(slots=True)
class Document:
    """One YAML document: plain values, and the line (from 1) at which each of them begins."""

    value: Any
    lines: dict[Loc, int] = field(default_factory=dict)

    def line(self, loc: Loc) -> int:
        """Return the line of a value, or of its nearest ancestor if the value is not in the document."""
        while loc not in self.lines and loc:
            loc = loc[:-1]
        return self.lines.get(loc, 1)


def read_documents(text: str) -> Iterator[Document]:
    """Yield the documents of a YAML stream, without empty ones.

    Raises:
        YamlError: not YAML, a duplicate key, or values that JSON cannot hold.
    """
    try:
        for node in yaml.compose_all(_as_yaml(text), Loader=_Loader):
            reader = _Reader()
            value = reader.read(node, ())
            if value is not None:
                yield Document(value, reader.lines)
    except yaml.MarkedYAMLError as error:
        raise YamlError(_line_of(error), f"not YAML: {_reason(error)}") from error
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise YamlError(line, f"not YAML: the character {chr(error.character)!r} is not allowed") from error
    except RecursionError as error:
        raise YamlError(1, "not a manifest: nested too deeply") from error


class _Reader:
    """Converts the nodes of one document to values and records their lines."""

    def __init__(self) -> None:
        self.lines: dict[Loc, int] = {}
        self._open: list[yaml.Node] = []
        self._num_values = 0

    def read(self, node: yaml.Node, loc: Loc) -> Any:
        self.lines.setdefault(loc, _line(node))
        self._num_values += 1
        if self._num_values > _MAX_VALUES:
            raise YamlError(_line(node), f"not a manifest: more than {_MAX_VALUES} values")
        if isinstance(node, yaml.ScalarNode):
            return _scalar(node)
        if node.tag not in (_LIST, _MAPPING):
            raise _strange_tag(node)
        if len(self._open) >= _MAX_DEPTH:
            raise YamlError(_line(node), f"not a manifest: nested more than {_MAX_DEPTH} deep")
        if any(node is parent for parent in self._open):
            raise YamlError(_line(node), "not a manifest: an anchor contains itself")
        self._open.append(node)
        try:
            return self._mapping(node, loc) if isinstance(node, yaml.MappingNode) else self._list(node, loc)
        finally:
            self._open.pop()

    def _list(self, node: Any, loc: Loc) -> list[Any]:
        return [self.read(item, (*loc, at)) for at, item in enumerate(node.value)]

    def _mapping(self, node: yaml.MappingNode, loc: Loc) -> dict[str, Any]:
        values: dict[str, Any] = {}
        merged: dict[str, Any] = {}
        for key_node, value_node in node.value:
            if key_node.tag == _MERGE:
                merged = {**self._merged(value_node, loc), **merged}
                continue
            key = _key(key_node)
            if key in values:
                first = self.lines[(*loc, key)]
                raise YamlError(
                    _line(key_node), f"the key '{key}' is given twice, here and on line {first}; remove one"
                )
            self.lines[(*loc, key)] = _line(key_node)
            values[key] = self.read(value_node, (*loc, key))
        return {**merged, **values}

    def _merged(self, node: yaml.Node, loc: Loc) -> dict[str, Any]:
        """Return the values of a `<<` key. Earlier sources win, as YAML specifies."""
        sources = node.value if isinstance(node, yaml.SequenceNode) else [node]
        values: dict[str, Any] = {}
        for source in sources:
            if not isinstance(source, yaml.MappingNode):
                raise YamlError(_line(source), "'<<' must be a mapping, or a list of mappings")
            values = {**self.read(source, loc), **values}
        return values


def _key(node: yaml.Node) -> str:
    if not isinstance(node, yaml.ScalarNode):
        raise YamlError(_line(node), "a key must be text, not a list or a mapping")
    return _text(node, str(node.value))


def _scalar(node: yaml.ScalarNode) -> Any:
    text = str(node.value)
    match node.tag:
        case t if t in (_STR, _MERGE):
            return _text(node, text)
        case t if t == _NULL:
            return None
        case t if t == _BOOL:
            return text.lower() in _TRUE
        case t if t == _INT:
            return _integer(node, text)
        case t if t == _FLOAT:
            return _float(node, text)
    raise _strange_tag(node)


def _strange_tag(node: yaml.Node) -> YamlError:
    return YamlError(_line(node), f"the tag {node.tag} is not allowed in a manifest; remove it")


def _text(node: yaml.Node, text: str) -> str:
    if any("\ud800" <= character <= "\udfff" for character in text):
        raise YamlError(_line(node), f"{text!r} contains an unpaired surrogate")
    return text


def _integer(node: yaml.Node, text: str) -> int:
    digits = text.replace("_", "")
    try:
        number = int(digits, 8 if re.fullmatch(r"[-+]?0[0-7]+", digits) else 0)
    except ValueError:
        raise YamlError(_line(node), f"{text!r} is not an integer") from None
    if not -_LARGEST <= number < _LARGEST:
        raise YamlError(_line(node), f"the number {text} does not fit into 64 bits")
    return number


def _float(node: yaml.Node, text: str) -> float:
    """Parse a float. A whole one becomes an integer, as in Kubernetes, which stores JSON."""
    try:
        number = float(text)
    except ValueError:
        raise YamlError(_line(node), f"{text!r} is not a finite number") from None
    if not abs(number) < float("inf"):
        raise YamlError(_line(node), f"{text!r} is not a finite number")
    return int(number) if number.is_integer() and abs(number) < 2**53 else number


def _line(node: yaml.Node) -> int:
    return int(node.start_mark.line) + 1


def _line_of(error: yaml.MarkedYAMLError) -> int:
    is_about_a_key = (
        error.context == "while scanning a simple key"
    )  # the parser notices the missing colon only on later lines
    mark = (error.context_mark if is_about_a_key else None) or error.problem_mark or error.context_mark
    return mark.line + 1 if mark is not None else 1


def _reason(error: yaml.MarkedYAMLError) -> str:
    reason = ", ".join(part for part in (error.context, error.problem) if part)
    hint = next((hint for words, hint in _HINTS.items() if words in reason), "")
    return f"{reason}{hint}"
