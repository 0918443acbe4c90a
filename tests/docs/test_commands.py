"""Every command of the pages is one: its program, options, files, targets and values exist."""

import tomllib

import pytest
from tests.docs.commands import CLUSTER_PROGRAMS, check, program, simple
from tests.docs.markdown import ROOT, commands
from typer._click.exceptions import UsageError

SIMPLE = sorted({tuple(words) for line in commands() for words in simple(line)})
OF_A_CLUSTER = [words for words in SIMPLE if program(words) in CLUSTER_PROGRAMS]
OURS = [words for words in SIMPLE if words not in OF_A_CLUSTER]


@pytest.mark.parametrize("words", OURS, ids=" ".join)
def test_a_command_is_one_and_takes_these_options(words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MARLAAS_ENVIRONMENT_SOCKET", "socket")  # the sandbox pod sets it for `marlaas env serve`
    check(words)


@pytest.mark.api_server  # needs kubectl and helm, which `make control-plane-tools` builds
@pytest.mark.parametrize("words", OF_A_CLUSTER, ids=" ".join)
def test_a_command_of_kubernetes_is_one_and_takes_these_options(words: tuple[str, ...]) -> None:
    check(words)


@pytest.mark.parametrize(
    "line",
    [
        "marlaas run --no-such-option x.yaml",
        "marlaas fly",
        "marlaas validate examples/nowhere.yaml",
        "kubectl marlaas why reverse --no-such-option",
        "make no-such-target",
        "python -m bench no_such_measurement",
        "python -m bench multitenant --no-such-option",
        "python -m no_such_module",
        "NO_SUCH_VARIABLE=1 make test",
        "kubectl explain rljob.spec.noSuchField",
        "docker build -f images/operator.Dockerfile --build-arg NO_SUCH=1 .",
    ],
)
def test_a_wrong_command_is_found(line: str) -> None:
    with pytest.raises((AssertionError, KeyError, UsageError)):
        [check(words) for words in simple(line)]


def test_kubectl_finds_our_plugin() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    assert project["project"]["scripts"]["kubectl-marlaas"] == "marlaas.cli:plugin"
