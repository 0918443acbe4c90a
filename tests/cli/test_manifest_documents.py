"""YAML as Kubernetes reads it, with lines; files that are no manifests, or are read in another way."""

import io
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from marlaas.manifest import InvalidManifest, load
from marlaas.manifest.documents import YamlError, read_documents

Write = Callable[..., Path]
SCALARS = {
    "3e-4": 0.0003,
    "3.5": 3.5,
    "1.0": 1,
    "08": 8,
    "010": 8,
    "0x1F": 31,
    "0b101": 5,
    "1_000": 1000,
    "-7": -7,
    "+7": 7,
    "'3'": "3",
    "on": True,
    "No": False,
    "y": True,
    "~": None,
    "null": None,
    "2024-01-01": "2024-01-01",
    "1:30": "1:30",
    "!!int '5'": 5,
    "!!str 5": "5",
    "<<": "<<",
}


@pytest.mark.parametrize(("text", "value"), SCALARS.items())
def test_a_scalar_is_read_as_kubernetes_reads_it(text: str, value: Any) -> None:
    (document,) = read_documents(f"- {text}\n")
    assert document.value == [value]
    assert type(document.value[0]) is type(value)


def test_a_value_has_its_line_and_what_is_not_written_that_of_what_holds_it() -> None:
    (document,) = read_documents("a: 1\nb:\n  - x\n  - {c: 2,\n     d: 3}\n")
    places = {("a",): 1, ("b",): 2, ("b", 0): 3, ("b", 1): 4, ("b", 1, "d"): 5, ("b", 1, "missing", 3, "deep"): 4}
    assert {place: document.line(place) for place in places} == places


def test_lines_count_on_through_the_documents_and_empty_ones_are_left_out() -> None:
    documents = list(read_documents("---\n---\na: 1\n---\n# nothing\n---\nb: 2\n"))
    assert [(document.value, document.line(())) for document in documents] == [({"a": 1}, 3), ({"b": 2}, 7)]


def test_anchors_and_merges_work_and_the_nearer_value_wins() -> None:
    (document,) = read_documents("base: &base {x: 1, y: 2}\nall:\n  <<: *base\n  x: 3\nboth:\n  <<: [{x: 4}, *base]\n")
    assert document.value["all"] == {"x": 3, "y": 2}
    assert document.value["both"] == {"x": 4, "y": 2}


ERRORS = {
    "a: 1\nb: 2\na: 3\n": (3, "the key 'a' is given twice, here and on line 1; remove one"),
    "a:\n\tb: 1\n": (
        2,
        "not YAML: while scanning for the next token, found character '\\t' that cannot start any token; indent with spaces, not tabs",
    ),
    "a: 1\n b: 2\n": (
        2,
        "not YAML: mapping values are not allowed here; check the indentation here and above, and the space after every colon",
    ),
    "a: 1\nb:2\n": (
        2,
        "not YAML: while scanning a simple key, could not find expected ':'; check the space after every colon",
    ),
    "a: [1, 2\n": (2, "not YAML: while parsing a flow sequence, expected ',' or ']', but got '<stream end>'"),
    "a: 1\nb: *nope\n": (2, "not YAML: found undefined alias 'nope'"),
    "a: &x\n  - *x\n": (1, "not a manifest: an anchor contains itself"),
    "a: .inf\n": (1, "'.inf' is not a finite number"),
    "a: 1e999\n": (1, "'1e999' is not a finite number"),
    "a: 99999999999999999999\n": (1, "the number 99999999999999999999 does not fit into 64 bits"),
    "a: 1\nb: !foo 5\n": (2, "the tag !foo is not allowed in a manifest; remove it"),
    "a: !!python/object:os.system {}\n": (
        1,
        "the tag tag:yaml.org,2002:python/object:os.system is not allowed in a manifest; remove it",
    ),
    "a: 1\n? [b]\n: 2\n": (2, "a key must be text, not a list or a mapping"),
    "a: 1\nb: \x01\n": (2, "not YAML: the character '\\x01' is not allowed"),
    "a: {<<: 5}\n": (1, "'<<' must be a mapping, or a list of mappings"),
    "a: " + "[" * 100 + "]" * 100: (1, "not a manifest: nested more than 100 deep"),
    'a: "\\ud800"\n': (1, "'\\ud800' contains an unpaired surrogate"),
    "[" * 5000: (1, "not a manifest: nested too deeply"),
}


@pytest.mark.parametrize("text", ERRORS, ids=[ascii(text[:12]) for text in ERRORS])
def test_what_is_no_yaml_is_told_with_its_line(text: str) -> None:
    with pytest.raises(YamlError) as caught:
        list(read_documents(text))
    assert (caught.value.line, str(caught.value)) == ERRORS[text]


def test_a_bomb_of_aliases_does_not_go_off() -> None:
    levels = [f"l{level}: &l{level} [{', '.join([f'*l{level - 1}'] * 9)}]" for level in range(1, 9)]
    with pytest.raises(YamlError, match="more than 100000 values"):
        list(read_documents("\n".join(["l0: &l0 [x]", *levels])))


def test_standard_input_is_a_file_too(manifest: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    data = manifest("training: {stepz: 3}").read_bytes()
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))
    with pytest.raises(InvalidManifest) as caught:
        load(["-"])
    assert str(caught.value).splitlines()[1] == "<stdin>:21: spec.training.stepz: unknown field; did you mean 'steps'?"


FILES = {
    "empty": (b"", "bad.yaml: contains no objects"),
    "comments alone": (b"# nothing\n---\n", "bad.yaml: contains no objects"),
    "not UTF-8": (b"a: 1\nb: \xff\n", "bad.yaml:2: not UTF-8 text: byte 0xff"),
    "not YAML": (b"a: &b\n b: *c\n", "bad.yaml:2: not YAML: found undefined alias 'c'"),
    "a key twice": (b"a: 1\na: 2\n", "bad.yaml:2: the key 'a' is given twice, here and on line 1; remove one"),
    "huge": (b"#" * (10 * 2**20 + 1), "bad.yaml: not a manifest: larger than 10 MiB"),
}


@pytest.mark.parametrize("kind", FILES)
def test_a_file_that_is_no_manifest_is_told_from_the_others(manifest: Write, tmp_path: Path, kind: str) -> None:
    data, line = FILES[kind]
    (tmp_path / "bad.yaml").write_bytes(data)
    with pytest.raises(InvalidManifest) as caught:
        load([manifest(), "bad.yaml"])
    assert str(caught.value) == line


def test_a_byte_order_mark_is_no_part_of_the_text(manifest: Write) -> None:
    path = manifest()
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    assert len(load([path]).jobs) == 1
