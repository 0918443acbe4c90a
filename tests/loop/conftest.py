import json
from pathlib import Path

import pytest
from tests.random_llama import save_random_llama

from marlaas.models import prepare
from marlaas.models.tokenizer import END, PAD, VOCABULARY, save_tokenizer
from marlaas_api import subjects
from marlaas_worker.sandbox import service as sandbox


@pytest.fixture(scope="session")
def tiny_model() -> Path:
    return prepare("tiny")


@pytest.fixture(scope="session")
def other_model(tmp_path_factory) -> Path:
    """A smaller Llama than `tiny`, with random weights; its characters have other ids."""
    folder = tmp_path_factory.mktemp("other-model")
    save_tokenizer(folder, 512)
    path = folder / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    characters = {token: at for token, at in VOCABULARY.items() if len(token) == 1}
    ids = [*characters.values()]
    tokenizer["model"]["vocab"] |= dict(zip(characters, ids[1:] + ids[:1], strict=True))
    path.write_text(json.dumps(tokenizer))
    return save_random_llama(
        folder,
        len(VOCABULARY),
        hidden_size=64,
        intermediate_size=96,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=512,
        initializer_range=0.15,
        bos_token_id=None,
        eos_token_id=VOCABULARY[END],
        pad_token_id=VOCABULARY[PAD],
    )


@pytest.fixture(autouse=True)
def _tasks_come_again_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """A task whose sandbox died is delivered again after three seconds instead of ten; who plays it says so ten times as often as that."""
    monkeypatch.setattr(subjects, "TASK_ACK_WAIT_S", 3.0)
    monkeypatch.setattr(sandbox, "BEAT_S", 0.3)
