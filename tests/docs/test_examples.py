"""The examples of the pages work: every command is one and takes its options, commands print what is shown, Python runs, manifests are valid, tables show real columns."""

import itertools
import re
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml
from tests.docs.markdown import CLUSTER_PROGRAMS, ROOT, blocks, check, commands, name, pages, program, simple
from tests.tables import data, rows
from tools.crd import PRESENTATIONS
from typer._click.exceptions import UsageError
from typer.testing import CliRunner

from marlaas.cli.app import build
from marlaas.envs.loading import resolve
from marlaas.manifest import load
from marlaas_api.kinds import RLJob
from marlaas_api.kinds.checks import check_supported

WITH_COMMANDS = [page for page in pages() if any(block.page == page and block.language == "bash" for block in blocks())]
JOB: dict[str, Any] = data(__file__, "job")
"""What a piece of a job in a page is put into."""


def of(*languages: str):
    found = [block for block in blocks() if block.language in languages]
    return [pytest.param(block, id=f"{name(block.page)}-{number}") for number, block in enumerate(found)]


def write_modules(page, folder):
    """Write the page's files into the folder, and the examples of the tree beside them."""
    for block in blocks():
        named = re.match(r"# (\w+\.py)\n", block.text)
        if block.page == page and (file := named[1] if named else block.file):
            (folder / file).write_text(block.text, "utf-8")
    (folder / "examples").symlink_to(ROOT / "examples")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty working directory, from which modules are imported and then forgotten."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    before = set(sys.modules)
    yield tmp_path
    for module in set(sys.modules) - before:
        if str(tmp_path) in str(getattr(sys.modules[module], "__file__", None)):
            del sys.modules[module]


def squeezed(text):
    lines = [re.sub(r" {2,}", "  ", line).rstrip() for line in text.splitlines()]
    return [line for line in lines if line and not line.startswith("seconds in tools")]


@pytest.mark.parametrize("page", WITH_COMMANDS, ids=name)
def test_the_commands_of_a_page_print_what_it_shows(page, folder, monkeypatch):
    write_modules(page, folder)
    own = [block for block in blocks() if block.page == page]
    for block, shown in itertools.pairwise(own):
        if block.language != "bash":
            continue
        assert shown.language == "text", f"no output is shown below {block.text}"
        printed = "".join(run(line, monkeypatch) for line in block.text.splitlines())
        assert [line for line in squeezed(shown.text) if line not in squeezed(printed)] == [], printed


def run(line, monkeypatch):
    program, *words = shlex.split(line)
    if program == "cd":
        monkeypatch.chdir(words[0])
        monkeypatch.syspath_prepend(str(Path.cwd()))
        return ""
    assert program == "marlaas"
    result = CliRunner().invoke(build(words), words)
    assert result.exit_code == 0, result.output
    return result.output


@pytest.mark.parametrize("block", of("python"))
def test_python_runs(block, folder):
    write_modules(block.page, folder)
    module = ModuleType("of_the_page")
    exec(compile(block.text, name(block.page), "exec"), vars(module))
    for function in [value for key, value in vars(module).items() if key.startswith("test_")]:
        if function.__code__.co_argcount == 0:
            function()


@pytest.mark.parametrize("block", of("yaml"))
def test_a_manifest_or_a_piece_of_one_is_valid(block, folder):
    write_modules(block.page, folder)
    documents = list(yaml.safe_load_all(block.text))
    if "apiVersion" in documents[0]:
        (folder / "shown.yaml").write_text(block.text, "utf-8")
        manifest = load([folder / "shown.yaml"], runnable=False)
        assert manifest.jobs or manifest.pools
        jobs = [job.model_dump(by_alias=True, mode="json", exclude_unset=True) for job in manifest.jobs]
    else:
        (piece,) = documents
        jobs = [merged(JOB, piece if "spec" in piece else {"spec": piece})]
    for body in jobs:
        job = RLJob.model_validate(body)
        assert list(check_supported(job)) == []
        environment = job.spec.environment
        if environment.name is not None or environment.entrypoint:
            resolve(environment.name or environment.entrypoint[-1], environment.args)


def merged(base, piece):
    """Put a piece into a document; an environment replaces the other one whole."""
    found = dict(base)
    for key, value in piece.items():
        inside = isinstance(value, Mapping) and key != "environment" and key in found
        found[key] = merged(found[key], value) if inside else value
    return found


@pytest.mark.parametrize("block", of("console"))
def test_a_table_of_kubectl_has_the_real_columns(block):
    command, *answer = block.text.splitlines()
    if resource := re.match(r"\$ kubectl get (rljobs|modelpools|tenants)\b", command):
        (shown,) = (shown for shown in PRESENTATIONS.values() if shown.plural == resource[1])
        columns = [heading.upper() for heading, _, _, priority in shown.columns if priority == 0]
        assert answer[0].split() == ["NAMESPACE", "NAME", *columns]


@pytest.mark.parametrize("block", of("dockerfile"))
def test_an_image_copies_files_of_its_page(block, folder):
    write_modules(block.page, folder)
    assert block.text.startswith("FROM registry.example.com/marlaas/worker:")
    copied = re.findall(r"^COPY (\S+)", block.text, re.MULTILINE)
    assert copied
    assert all((folder / path).is_file() for path in copied)


def test_the_examples_for_a_cluster_run_on_one_machine():
    manifest = load(sorted((ROOT / "examples/cluster").glob("*.yaml")), runnable=True)
    assert [str(note) for note in manifest.notes] == []
    assert [job.metadata.namespace for job in manifest.jobs] == ["team-a"]


SIMPLE = sorted({tuple(words) for line in commands() for words in simple(line)})
OF_A_CLUSTER = [words for words in SIMPLE if program(words) in CLUSTER_PROGRAMS]
OURS = [words for words in SIMPLE if words not in OF_A_CLUSTER]


@pytest.mark.parametrize("words", OURS, ids=" ".join)
def test_a_command_is_one_and_takes_these_options(words, monkeypatch):
    monkeypatch.setenv("MARLAAS_ENVIRONMENT_SOCKET", "socket")  # the sandbox pod sets it for `marlaas env serve`
    check(words)


@pytest.mark.api_server  # needs kubectl and helm, which `make control-plane-tools` builds
@pytest.mark.parametrize("words", OF_A_CLUSTER, ids=" ".join)
def test_a_command_of_kubernetes_is_one_and_takes_these_options(words):
    check(words)


@pytest.mark.parametrize("line", rows(__file__, "wrong_commands"))
def test_a_wrong_command_is_found(line):
    with pytest.raises((AssertionError, KeyError, UsageError)):
        [check(words) for words in simple(line)]
