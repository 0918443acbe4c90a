"""YAML as Kubernetes reads it, with lines."""

from typing import Any

import pytest

from marlaas.manifest.documents import YamlError, read_documents

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


def test_every_value_has_its_line() -> None:
    (document,) = read_documents("a: 1\nb:\n  - x\n  - {c: 2,\n     d: 3}\n")
    assert [document.line(loc) for loc in [("a",), ("b",), ("b", 0), ("b", 1), ("b", 1, "d")]] == [1, 2, 3, 4, 5]


def test_what_is_not_written_has_the_line_of_what_holds_it() -> None:
    (document,) = read_documents("a: 1\nb:\n  c: 2\n")
    assert document.line(("b", "missing", 3, "deep")) == 2


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
