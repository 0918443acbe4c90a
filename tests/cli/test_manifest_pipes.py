"""Manifests from pipes, manifests as JSON, and unrendered templates."""

import io
import json
import os
import sys
from pathlib import Path

import pytest
import yaml

from marlaas.manifest import InvalidManifest, load
from marlaas.manifest.documents import read_documents

POOL = {
    "apiVersion": "marlaas.dev/v1alpha1",
    "kind": "ModelPool",
    "metadata": {"name": "tiny", "annotations": {"note": "a\tb \\ud83d \U0001f600"}},
    "spec": {"model": {"builtin": "tiny"}},
}


@pytest.mark.parametrize("indent", [None, 1, "\t"])
@pytest.mark.parametrize("ascii_only", [True, False])
def test_json_means_what_it_means_to_kubectl(indent, ascii_only):
    text = json.dumps(POOL, indent=indent, ensure_ascii=ascii_only)
    (document,) = read_documents(text)
    assert document.value == POOL


def test_a_pipe_and_standard_input_are_read_once_and_count_every_time(monkeypatch):
    text = yaml.safe_dump(POOL).encode()
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text)))
    reading, writing = os.pipe()
    os.write(writing, text)
    os.close(writing)
    pipe = f"/dev/fd/{reading}"
    try:
        for file in ("-", pipe):
            for _ in range(2):
                assert [pool.metadata.name for pool in load([file], runnable=False).pools] == ["tiny"]
    finally:
        os.close(reading)


def test_an_unrendered_template_is_said_to_be_one(tmp_path: Path):
    path = tmp_path / "pool.yaml"
    path.write_text("apiVersion: marlaas.dev/v1alpha1\nkind: ModelPool\nmetadata: {{ .Values.metadata }}\n")
    with pytest.raises(InvalidManifest, match=r"\{\{ .Values.metadata \}\} is a placeholder of a template: render"):
        load([str(path)], runnable=False)
