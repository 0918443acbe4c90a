"""Arguments of an environment in a document: kept as compressed text, because only sandboxes read them and every role keeps all documents."""

import json
import zlib
from collections.abc import Iterator, Mapping
from typing import Any, Self
from weakref import WeakValueDictionary

from pydantic import GetCoreSchemaHandler
from pydantic_core import CoreSchema, core_schema

_COMPRESSED_FROM_BYTES = 512


class _Text:
    """The text of arguments, which equal arguments share."""

    __slots__ = ("__weakref__", "data", "is_compressed")

    def __init__(self, data: bytes, *, is_compressed: bool) -> None:
        self.data, self.is_compressed = data, is_compressed


_texts: WeakValueDictionary[int, _Text] = WeakValueDictionary()
"""Compressed texts by their hash, as long as arguments have them."""


class PackedArgs(Mapping[str, Any]):
    """A JSON object, parsed at each access. On the bus and in JSON it is the object itself.

    Equal arguments of this process share their text: the operator keeps each job's object and its document.
    """

    __slots__ = ("_text",)

    def __init__(self, value: Mapping[str, Any]) -> None:
        text = json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode(errors="surrogatepass")
        if len(text) < _COMPRESSED_FROM_BYTES:
            self._text = _Text(text, is_compressed=False)
            return
        own = _Text(zlib.compress(text, 1), is_compressed=True)
        known = _texts.setdefault(hash(own.data), own)
        self._text = known if known.data == own.data else own

    @property
    def value(self) -> dict[str, Any]:
        """The arguments, parsed anew."""
        text = zlib.decompress(self._text.data) if self._text.is_compressed else self._text.data
        found: dict[str, Any] = json.loads(text.decode(errors="surrogatepass"))
        return found

    def __getitem__(self, key: str) -> Any:
        return self.value[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.value)

    def __len__(self) -> int:
        return len(self.value)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, PackedArgs):
            return self._text.data == other._text.data
        return isinstance(other, Mapping) and self.value == other

    def __hash__(self) -> int:
        return hash(self._text.data)

    def __repr__(self) -> str:
        return f"PackedArgs({len(self._text.data)} bytes)"

    @classmethod
    def of(cls, value: object) -> Self:
        """Return packed arguments. Raises ValueError if the value is not a JSON object."""
        if isinstance(value, cls):
            return value
        if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
            raise ValueError(f"args must be a mapping with keys of type text, found {type(value).__name__}")
        return cls(value)

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Read a mapping, write a mapping."""
        written = core_schema.plain_serializer_function_ser_schema(lambda packed: packed.value)
        return core_schema.no_info_plain_validator_function(cls.of, serialization=written)
