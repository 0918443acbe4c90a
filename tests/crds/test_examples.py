"""What we show people to apply is taken as it stands, and a changed job is answered with a sentence."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.crds.conftest import problems

from marlaas_api.kinds import API_VERSION

EXAMPLES = sorted((Path(__file__).parents[2] / "examples").rglob("*.yaml"))


def _ours(path: Path) -> bool:
    return f"apiVersion: {API_VERSION}" in path.read_text(encoding="utf-8")


@pytest.mark.parametrize("path", [path for path in EXAMPLES if _ours(path)], ids=lambda path: path.stem)
def test_every_example_is_taken_as_kubectl_reads_it(plane, api, path):
    """But for its namespace, which is not made here."""
    for body in _objects(plane.kubectl("create", "--dry-run=client", "--output=json", "-f", path)):
        if body["apiVersion"] == API_VERSION:
            body["metadata"].pop("namespace", None)
            assert problems(api.create(body, dry=True)) == set(), body["metadata"]["name"]


def _objects(text: str) -> Iterator[Any]:
    """JSON objects one after the other, as kubectl prints them."""
    while text := text.strip():
        body, end = json.JSONDecoder().raw_decode(text)
        yield body
        text = text[end:]
