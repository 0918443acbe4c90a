"""What the README, docs/operations.md, docs/how-to/kubernetes.md and examples/cluster show works: manifests, commands, values of the chart, files, columns."""

import json
import re
import shlex
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from tools.crd import PRESENTATIONS
from typer.testing import CliRunner

from marlaas.cli.app import build
from marlaas.manifest import load
from marlaas_api.reasons import Reason

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
TENANTS_PAGE = ROOT / "docs" / "kubernetes.md"
PAGES = [README, *(ROOT / "docs" / name for name in ("operations.md", "kubernetes.md"))]
TEXT = "\n".join(page.read_text(encoding="utf-8") for page in PAGES)
VALUES: dict[str, Any] = yaml.safe_load((ROOT / "charts" / "marlaas" / "values.yaml").read_text(encoding="utf-8"))


def _blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)


def _commands() -> list[str]:
    lines = [line for block in _blocks("sh") for line in block.splitlines()]
    quoted = re.findall(r"`((?:kubectl|helm|marlaas) [^`\n]+)`", TEXT)
    return sorted({part.strip() for line in [*lines, *quoted] for part in line.split("&&") if part.strip()})


@pytest.mark.parametrize("command", [line for line in _commands() if line.startswith(("marlaas ", "kubectl marlaas "))])
def test_a_command_of_ours_is_one_and_takes_these_options(command: str) -> None:
    words = shlex.split(command.removeprefix("kubectl "))[1:]
    if words == ["run"]:
        return
    usage = CliRunner().invoke(build(words), [words[0], "--help"], terminal_width=200)
    assert usage.exit_code == 0, usage.output
    for option in (word.partition("=")[0] for word in words if word.startswith("-")):
        assert re.search(rf"(?<![\w-]){re.escape(option)}(?![\w-])", usage.output), f"{option} of {command}"


def test_every_value_that_is_set_is_one_of_the_chart() -> None:
    keys = [key for command in _commands() for key in re.findall(r"--set(?:-json)? '?([\w.]+)=", command)]
    keys += re.findall(r"`((?:nats|blobs|network|sandbox|operator|worker)\.[a-z]\w+(?:\.\w+)*)`", TEXT)
    assert len(keys) > 10
    chart = [
        key for key in keys if key not in {"nats.conf", "sandbox.nodeSelector", "rollout.memory", "trainer.memory"}
    ]
    for key in chart:
        value: Any = VALUES
        for step in key.split("."):
            assert isinstance(value, dict), key
            assert step in value, key
            value = value[step]


@pytest.mark.parametrize("command", [line for line in _commands() if "--set-json" in line])
def test_json_on_a_command_line_is_json(command: str) -> None:
    words = shlex.split(command)
    json.loads(words[words.index("--set-json") + 1].partition("=")[2])


def test_every_file_that_is_named_is_there() -> None:
    named = set(re.findall(r"(?:examples|images|charts|docs)/[\w./-]*\w", TEXT))
    assert {"images/operator.Dockerfile", "examples/cluster/rljob.yaml", "charts/marlaas"} <= named
    assert [name for name in sorted(named) if not (ROOT / name).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_leads_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8"))
    for path, _, heading in (link.partition("#") for link in links if "://" not in link):
        target = page.parent / path if path else page
        assert target.exists(), path
        headings = [line for line in target.read_text("utf-8").splitlines() if line[:1] == "#"] if heading else [""]
        anchors = {_anchor(line) for line in headings}
        assert heading in anchors, f"{path}#{heading}"


def _anchor(line: str) -> str:
    return re.sub(r"[^\w -]", "", line.lstrip("# ").lower()).replace(" ", "-")


def test_every_manifest_is_right(tmp_path: Path) -> None:
    manifests = [block for block in _blocks("yaml") if yaml.safe_load(block)["apiVersion"].startswith("marlaas.dev/")]
    assert len(manifests) > 1  # the README's job, and a pool on accelerators
    for number, manifest in enumerate(manifests):
        path = tmp_path / f"{number}.yaml"
        path.write_text(manifest)
        load([path], runnable=False)


def test_every_column_is_explained() -> None:
    page = TENANTS_PAGE.read_text(encoding="utf-8")
    for heading, *_ in PRESENTATIONS["RLJob"].columns:
        assert heading == "Age" or f"| {heading.upper()} |" in page
    for heading, *_ in PRESENTATIONS["ModelPool"].columns:
        assert heading == "Age" or heading.upper() in page


def test_every_reason_that_is_named_is_one() -> None:
    named = {word for word in re.findall(r"`((?:[A-Z][a-z]+){2,})`", TEXT) if not word.startswith(("Read", "Volume"))}
    section = TENANTS_PAGE.read_text("utf-8").partition("## When it waits or fails")[2]
    rows = re.findall(r"^\| (?:\*Failed:\* )?((?:[A-Z][a-z]+[A-Za-z]*(?:, )?)+) \|", section, re.MULTILINE)
    in_the_table = {word for row in rows for word in row.split(", ")}
    assert Reason.WAITING_FOR_POOL in in_the_table
    assert named | in_the_table <= set(Reason)


def test_every_function_of_one_step_is_where_the_page_says() -> None:
    page = (ROOT / "docs" / "one-step.md").read_text(encoding="utf-8")
    functions = re.findall(r"\[`([\w.]+)`\]\(\.\./([\w/.]+)\)", page)
    assert len(functions) > 30
    assert page.count("\n") <= 80
    for name, path in functions:
        source = (ROOT / path).read_text(encoding="utf-8")
        for part in name.split("."):
            assert re.search(rf"(?:def|class) {part}\b", source), f"{name} in {path}"


def test_the_examples_for_a_cluster_run_on_one_machine() -> None:
    manifest = load(sorted((ROOT / "examples" / "cluster").glob("*.yaml")), runnable=True)
    assert [str(note) for note in manifest.notes] == []
    (job,) = manifest.jobs
    assert job.metadata.namespace == "team-a"


def test_the_plugin_is_installed_with_the_package() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert project["project"]["scripts"]["kubectl-marlaas"] == "marlaas.cli:plugin"


def test_every_test_that_keeps_a_promise_is_there() -> None:
    promises = (ROOT / "docs" / "promises.md").read_text(encoding="utf-8")
    files = [path for folder in ("tests", "e2e/tests") for path in (ROOT / folder).rglob("*.py")]
    tests = {name for path in files for name in re.findall(r"def (test_\w+)\(", path.read_text(encoding="utf-8"))}
    assert set(re.findall(r"`(test_\w+)`", promises)) <= tests
    assert {Path(name).name for name in re.findall(r"`((?:[\w/]+/)?test_\w+\.py)`", promises)} <= {
        path.name for path in files
    }
