"""Conversion of pydantic models to structural schemas, the JSON schema dialect of CustomResourceDefinitions.

Differences from pydantic's schema: no references, no titles, no null (an optional field may be absent), no tuples, and
no `additionalProperties: false` (unknown fields are pruned, and refused for strict clients). Exclusive bounds are
booleans, and a nested object has a default, so that its fields' defaults apply when it is absent.
"""

from collections.abc import Mapping
from typing import Any

from marlaas_api.kinds import Kind

Schema = dict[str, Any]

_RULES = "x-kubernetes-validations"
_KEPT = (
    "description",
    "type",
    "format",
    "enum",
    "default",
    "minimum",
    "exclusiveMinimum",
    "maximum",
    "exclusiveMaximum",
    "minLength",
    "maxLength",
    "pattern",
    "minItems",
    "maxItems",
    "minProperties",
    "maxProperties",
    "anyOf",
    "items",
    "additionalProperties",
    "properties",
    "required",
    "nullable",
    "x-kubernetes-int-or-string",
    "x-kubernetes-list-type",
    "x-kubernetes-list-map-keys",
    "x-kubernetes-preserve-unknown-fields",
    _RULES,
)
_BOUNDS = {
    "minimum": ("exclusiveMinimum", ">", ("at least", "more than")),
    "maximum": ("exclusiveMaximum", "<", ("at most", "less than")),
}
"""For each bound: its exclusive form, the operator of CEL, and the words for the inclusive and the exclusive one."""
_FREE = {"nullable": True, "x-kubernetes-preserve-unknown-fields": True}
"""Schema of any value, for a mapping's entries.

It is not used for a whole mapping, because CEL's equality (for immutability) does not detect a renamed key of a
free-form object.
"""
_ENVELOPE = {
    "apiVersion": {"description": "Group and version of the kind.", "type": "string"},
    "kind": {"description": "Name of the kind.", "type": "string"},
}


def kind_schema(kind: type[Kind]) -> Schema:
    """Return the `openAPIV3Schema` of a kind, including `status`. In metadata, only the name can be restricted."""
    whole = kind.model_json_schema(by_alias=True)
    definitions = whole["$defs"]
    name = definitions["ObjectMeta"]["properties"]["name"]
    restricted = {key: name[key] for key in ("type", "maxLength", "pattern")}
    spec, status = (structural(whole["properties"][part], definitions) for part in ("spec", "status"))
    return {
        "description": whole["description"],
        "type": "object",
        "properties": {
            **_ENVELOPE,
            "metadata": {"type": "object", "properties": {"name": restricted}},
            "spec": spec,
            "status": status,
        },
        "required": ["spec"],
    }


def structural(schema: Schema, definitions: Mapping[str, Schema]) -> Schema:
    """Convert a part of pydantic's schema; `definitions` resolves its references."""
    schema = _resolved(schema, definitions)
    if "const" in schema:
        schema["enum"] = [schema["const"]]
    if "prefixItems" in schema:
        schema["items"] = schema["prefixItems"][0]
    if schema.get("type") == "integer":
        schema["format"] = "int64"
    for bound in _BOUNDS:
        _convert_bound(schema, bound)
    _convert_children(schema, definitions)
    return _ordered(schema)


def _convert_bound(schema: Schema, bound: str) -> None:
    """Convert one bound to the API server's form; a fractional bound also becomes a rule.

    The server truncates a bound to the type of the value: `minimum: 0.01` is 0 for an integer. A fractional bound is
    therefore never exclusive in the schema: otherwise 0 would be refused although `exclusiveMinimum: -0.5` allows it.
    The rule has the exact bound.
    """
    exclusive, sign, words = _BOUNDS[bound]
    is_exclusive = exclusive in schema
    limit = schema.pop(exclusive, schema.get(bound))
    if limit is None:
        return
    schema[bound] = limit
    if not float(limit).is_integer():
        rule = f"self {sign} {limit}" if is_exclusive else f"self {sign}= {limit}"
        schema[_RULES] = [*schema.get(_RULES, ()), {"rule": rule, "message": f"must be {words[is_exclusive]} {limit}"}]
    elif is_exclusive:
        schema[exclusive] = True


def _resolved(schema: Schema, definitions: Mapping[str, Schema]) -> Schema:
    """Replace a reference, or an Optional, by the schema that it stands for; keys beside the reference take precedence."""
    inner: Schema = {}
    if "$ref" in schema:
        inner = definitions[schema["$ref"].rpartition("/")[2]]
    elif "anyOf" in schema and {"type": "null"} in schema["anyOf"]:
        (inner,) = (choice for choice in schema["anyOf"] if choice != {"type": "null"})
    if not inner:
        return dict(schema)
    outer = {key: value for key, value in schema.items() if key not in ("$ref", "anyOf")}
    if outer.get("default", inner) is None:
        del outer["default"]
    inner = _resolved(inner, definitions)
    if "properties" in inner:
        outer["description"] = _joined(outer.get("description", ""), inner.get("description", ""))
    rules = [*inner.get(_RULES, ()), *outer.get(_RULES, ())]
    return inner | outer | ({_RULES: rules} if rules else {})


def _joined(field: str, kind: str) -> str:
    """Join the descriptions of a field and of its object type; drop one that the other contains."""
    field, kind = field.strip(), kind.strip()
    if kind.startswith(field.rstrip(".")):
        return kind
    return field if kind in field else f"{field} {kind}"


def _convert_children(schema: Schema, definitions: Mapping[str, Schema]) -> None:
    if "items" in schema:
        schema["items"] = structural(schema["items"], definitions)
    additional = schema.pop("additionalProperties", None)
    if additional is True:
        schema["additionalProperties"] = dict(_FREE)
    elif isinstance(additional, dict):
        schema["additionalProperties"] = structural(additional, definitions)
    if "properties" in schema:
        required = schema.get("required", [])
        schema["properties"] = {
            name: _property(part, definitions, name in required) for name, part in schema["properties"].items()
        }
    if "default" in schema:
        schema["default"] = _minimal(schema["default"], schema)
        if schema["default"] in ([], ""):
            del schema["default"]


def _property(part: Schema, definitions: Mapping[str, Schema], required: bool) -> Schema:
    converted = structural(part, definitions)
    may_be_absent = {"type": "null"} in part.get("anyOf", ())
    if "properties" in converted and "default" not in converted and not required and not may_be_absent:
        return _ordered({**converted, "default": {}})
    return converted


def _ordered(schema: Schema) -> Schema:
    return {key: schema[key] for key in _KEPT if key in schema}


def _minimal(value: Any, schema: Schema) -> Any:
    """Remove from a default the values that the API server fills in itself: nulls, and defaults of inner fields."""
    if isinstance(value, list):
        return [_minimal(item, schema["items"]) for item in value]
    if not isinstance(value, dict) or "properties" not in schema:
        return value
    inner = schema["properties"]
    small = {key: _minimal(item, inner[key]) for key, item in value.items() if item is not None}
    return {key: item for key, item in small.items() if item != inner[key].get("default", [])}
