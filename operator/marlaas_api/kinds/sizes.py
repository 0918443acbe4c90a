"""Sizes of manifests as text. The chart's ValidatingAdmissionPolicy `sizes` has the same bounds: a CustomResourceDefinition cannot have them."""

import json
from collections.abc import Mapping
from typing import Any

MAX_ARGS_BYTES = 64 << 10
"""`environment.args` of a job."""
MAX_SPEC_BYTES = 96 << 10
"""The spec of a job. With every text escaped, its document still fits into a Secret and a message of the bus."""
MAX_OBJECT_BYTES = 256 << 10
"""Spec and metadata of any object. `kubectl apply` keeps a copy of the manifest in an annotation."""

_MEASURED = ("labels", "annotations", "finalizers", "ownerReferences")


def text_bytes(value: Any) -> int:
    """Return the length of a value as text in UTF-8. Numbers may be formatted differently by the API server, by a few bytes."""
    text = json.dumps(value, ensure_ascii=False, separators=(", ", ":"), default=str)
    return len(text.encode(errors="surrogatepass"))


def args_problem(args: Any, name: str = "args") -> str:
    """Return what is wrong with the size of `environment.args`, or of arguments of another name; empty if nothing is."""
    found = text_bytes(args)
    if found <= MAX_ARGS_BYTES:
        return ""
    return f"{name} has {found} bytes as text, at most {MAX_ARGS_BYTES} are allowed; load large data in the environment"


def object_problem(body: Mapping[str, Any]) -> str:
    """Return what is wrong with the size of an object, empty if nothing is."""
    found = text_bytes(body.get("spec"))
    if body.get("kind") == "RLJob" and found > MAX_SPEC_BYTES:
        return f"spec has {found} bytes as text, at most {MAX_SPEC_BYTES} are allowed; shorten its largest fields"
    metadata = body.get("metadata")
    kept = metadata if isinstance(metadata, Mapping) else {}
    found += text_bytes([kept.get(name) or {} for name in _MEASURED])
    if found <= MAX_OBJECT_BYTES:
        return ""
    return f"the object has {found} bytes as text, at most {MAX_OBJECT_BYTES} are allowed; remove annotations, or shorten the largest fields"
