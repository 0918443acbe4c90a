from pathlib import Path

import pytest

from marlaas.models import prepare
from marlaas_api import subjects
from marlaas_worker.sandbox import service as sandbox


@pytest.fixture(scope="session")
def tiny_model() -> Path:
    return prepare("tiny")


@pytest.fixture(autouse=True)
def _tasks_come_again_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """A task whose sandbox died is delivered again after one second instead of ten; who plays it says so three times as often as that."""
    monkeypatch.setattr(subjects, "TASK_ACK_WAIT_S", 1.0)
    monkeypatch.setattr(sandbox, "BEAT_S", 0.3)
