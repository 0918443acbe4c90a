"""Where a reply begins and ends, from a model's files."""

import json

import pytest
from tests.tables import rows

from marlaas.models.chat_template import closing_token, read_frame
from marlaas.models.end_tokens import read_ends
from marlaas.models.tokenizer import save_tokenizer
from marlaas_worker.rollout.tokenizer import PretrainedTokenizer

TOKENS = {"</s>": 1, "<|im_end|>": 2, "<|end|>": 3, "<|return|>": 4, "<|assistant|>": 5, "<|": 6}


@pytest.mark.parametrize(("template", "header", "opening", "end", "ignores"), rows(__file__, "frames"))
def test_what_a_template_writes_around_a_reply_is_found(tmp_path, template, header, opening, end, ignores):
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": template, "eos_token": "</s>"}))
    frame = read_frame(tmp_path)
    assert (frame.header, frame.opening, closing_token(frame, TOKENS)) == (header, opening, end)
    assert ("ignores add_generation_prompt" in frame.problem) is ignores


@pytest.mark.parametrize(("files", "ids", "notes"), rows(__file__, "ends"))
def test_a_reply_ends_at_each_token_that_a_file_the_tokenizer_or_the_template_names(tmp_path, files, ids, notes):
    save_tokenizer(tmp_path, 512)
    for name, fields in ({"generation_config.json": {"eos_token_id": 2}} | files).items():
        file = tmp_path / name
        before = json.loads(file.read_text()) if file.exists() else {}
        if fields is not None:
            file.write_text(json.dumps(before | fields))
    ends = PretrainedTokenizer.load(str(tmp_path)).ends
    assert sorted(ends.ids) == ids
    assert [words in note for words, note in zip(notes, ends.notes, strict=True)] == [True] * len(notes)
    assert read_ends(tmp_path, read_frame(tmp_path)) == ends
