"""Where a reply begins and ends, from a model's files."""

import json

import pytest
from tests.harness import pool_document
from tests.tables import rows

from marlaas.local.adapter import complete
from marlaas.models.chat_template import closing_token, frame_of, own_template, renderer
from marlaas.models.end_tokens import read_ends
from marlaas.models.tokenizer import save_tokenizer
from marlaas_api.messages.job_spec import ChatTemplateSettings
from marlaas_worker.rollout.tokenizer import PretrainedTokenizer

TOKENS = {"</s>": 1, "<|im_end|>": 2, "<|end|>": 3, "<|return|>": 4, "<|assistant|>": 5, "<|": 6}


@pytest.mark.parametrize(("template", "header", "opening", "end", "ignores"), rows(__file__, "frames"))
def test_what_a_template_writes_around_a_reply_is_found(tmp_path, template, header, opening, end, ignores):
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": template, "eos_token": "</s>"}))
    frame = frame_of(renderer(tmp_path, own_template(tmp_path), {}))
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
    assert read_ends(tmp_path, frame_of(renderer(tmp_path, own_template(tmp_path), {}))) == ends


@pytest.mark.parametrize(("pool", "job", "has_end", "text"), rows(__file__, "chosen"))
def test_an_exported_tokenizer_has_the_jobs_template_or_the_pools_or_the_models_own(tmp_path, pool, job, has_end, text):
    own = {"added_tokens_decoder": {"7": {"content": "<|im_end|>"}} if has_end else {}, "bos_token": "<s>"}
    own |= {"chat_template": "{{ messages[0].role }} {{ messages[0].content }}{{ mark or '.' }}", "eos_token": "</s>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(own))
    (tmp_path / "tools.jinja").write_text("tools")
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_text("{}")
    complete(tmp_path / "adapter", pool_document(tmp_path, chatTemplate=pool), ChatTemplateSettings(**job))
    render = renderer(tmp_path, own_template(tmp_path / "adapter"), {})
    assert render([{"role": "user", "content": "hi"}], True) == text
