from pathlib import Path

import pytest

from marlaas.models import prepare


@pytest.fixture(scope="session")
def tiny_model() -> Path:
    return prepare("tiny")
