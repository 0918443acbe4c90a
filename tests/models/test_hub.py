"""What is said when the hub does not give a model; the hub's client itself raises each error."""

import os

import httpx2
import pytest
from bench import hub_server
from huggingface_hub import constants
from huggingface_hub.utils import hf_raise_for_status
from tests.tables import rows

from marlaas.models import hub
from marlaas.models.errors import HubUnavailable, UploadRefused

REQUEST = httpx2.Request("GET", "http://hub/api/models/some/tiny/revision/main")
TOKEN = "set HF_TOKEN to a token that may read it"


def answered(status, code=""):
    hf_raise_for_status(httpx2.Response(status, headers={"X-Error-Code": code}, request=REQUEST))


def of_the_disk(number):
    try:
        raise OSError(number, os.strerror(number))
    except OSError as error:
        raise RuntimeError("Data processing error") from error


def away():
    raise httpx2.ConnectError("refused")


@pytest.fixture
def refused(monkeypatch, tmp_path):
    """Fetch from a hub that always fails so; return the error, and the pauses between the attempts."""
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))

    def fetch(fail, *arguments):
        pauses = []
        monkeypatch.setattr(hub, "_download", lambda *_: fail(*arguments))
        with pytest.raises(hub.ModelError) as caught:
            hub.fetch("some/tiny", "main", pauses.append)
        return type(caught.value), str(caught.value), pauses

    return fetch


FAILURES = {"answered": answered, "away": away, "of_the_disk": of_the_disk}


@pytest.mark.parametrize(("failure", "kind", "words", "pauses"), rows(__file__, "failures"))
def test_a_model_that_cannot_be_fetched_is_told_with_what_to_do(refused, monkeypatch, failure, kind, words, pauses):
    monkeypatch.delenv("HF_TOKEN", raising=False)
    how, *more = failure
    found = refused(FAILURES[how], *more)
    assert (found[0].__name__, words in found[1], found[2]) == (kind, True, pauses), found
    if kind == "UnknownModel" and TOKEN in words:
        monkeypatch.setenv("HF_TOKEN", "wrong")
        assert refused(FAILURES[how], *more)[1].endswith(f"{TOKEN}; the current token may not")


def test_offline_by_choice_nothing_is_tried_twice(refused, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    kind, text, pauses = refused(away)
    assert (kind, "HF_HUB_OFFLINE forbids downloads" in text, pauses) == (HubUnavailable, True, [])


def test_a_hub_that_is_busy_for_a_moment_delays_and_no_more(monkeypatch, tmp_path):
    failures, pauses = [429, 500], []
    monkeypatch.setattr(hub, "_download", lambda *_: answered(failures.pop(0)) if failures else tmp_path)
    assert (hub.fetch("some/tiny", "main", pauses.append), pauses) == (tmp_path, [1.0, 2.0])


@pytest.fixture
def writable(monkeypatch):
    """A hub that takes models of `acme`, and what uploads one to it."""
    monkeypatch.setenv("HF_TOKEN", hub_server.TOKEN)
    with hub_server.serving() as served:
        for name, value in served.constants.items():
            monkeypatch.setattr(constants, name, value)
        yield served


def test_an_upload_is_one_commit_that_is_repeated_while_the_hub_is_busy(writable, tmp_path):
    (tmp_path / "adapter").write_bytes(b"weights")
    writable.failures["commit"], pauses = [503, 429], []
    files = {"a.safetensors": tmp_path / "adapter", "README.md": b"# a card"}
    assert hub.upload("acme/lora", files, is_private=True, pause=pauses.append) == f"{writable.url}/acme/lora"
    assert writable.models == {"acme/lora": (True, {"a.safetensors": b"weights", "README.md": b"# a card"})}
    assert pauses == [1.0, 2.0]
    hub.upload("acme/open", files, is_private=False)
    assert not writable.models["acme/open"][0]


@pytest.mark.parametrize(
    ("repository", "failures", "kind", "words"),
    [
        ("acme/lora", [403], UploadRefused, "does not let this token write to acme/lora: .* `hf auth login`"),
        ("acme/lora", [413], UploadRefused, "the hub refuses acme/lora (413)"),
        ("acme/lora", [503] * hub.ATTEMPTS, HubUnavailable, "it answers 503, after 4 attempts"),
        ("acme/lo ra", [], UploadRefused, "acme/lo ra is no name of a repository: give OWNER/NAME"),
    ],
)
def test_a_refused_upload_is_told_with_what_to_do(writable, repository, failures, kind, words):
    writable.failures["commit"] = failures
    with pytest.raises(kind, match=words.replace("(413)", r"\(413\)")):
        hub.upload(repository, {"README.md": b""}, is_private=True, pause=lambda _: None)
