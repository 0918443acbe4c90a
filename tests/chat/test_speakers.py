"""Conversations with a scripted speaker, and the real speaker on a real, very small model."""

import io
from pathlib import Path

import pytest
from rich.console import Console

from marlaas.chat.conversations import Chat, ChatSampling, Columns, Side
from marlaas.chat.speakers import ModelSpeaker, ScriptedSpeaker
from marlaas.models import prepare
from marlaas_api.errors import InvalidInput


@pytest.fixture(scope="module")
def model() -> Path:
    return prepare("tiny")


@pytest.fixture(scope="module")
def adapter(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An adapter that changes everything."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    torch.manual_seed(0)
    tuned = get_peft_model(base, LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False))
    folder = tmp_path_factory.mktemp("adapter")
    tuned.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def speaker(model: Path, adapter: Path) -> ModelSpeaker:
    return ModelSpeaker(model, adapter)


def _base_alone(model: Path, prompt: str, num_tokens: int) -> str:
    """Greedy, by a plain loop over the model without any adapter."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    asked = [{"role": "user", "content": prompt}]
    text = tokenizer.apply_chat_template(asked, tokenize=False, add_generation_prompt=True)
    ids = tokenizer.encode(text, add_special_tokens=False)
    begin = len(ids)
    for _ in range(num_tokens):
        ids.append(int(base(torch.tensor([ids])).logits[0, -1].argmax()))
        if ids[-1] == base.generation_config.eos_token_id or ids[-1] == tokenizer.eos_token_id:
            break
    return tokenizer.decode(ids[begin:], skip_special_tokens=True, clean_up_tokenization_spaces=False)


def test_the_base_side_is_the_base_model_itself_and_the_adapter_is_not(model, speaker):
    prompt, pieces = "reverse: hello", []
    chat = Chat(speaker, ChatSampling(max_tokens=8, temperature=None))
    replies = dict(chat.ask(prompt, lambda side, piece: pieces.append((side, piece))))
    assert replies[Side.BASE] == _base_alone(model, prompt, 8)
    assert replies[Side.ADAPTER] != replies[Side.BASE]
    assert "".join(piece for side, piece in pieces if side is Side.BASE) == replies[Side.BASE]
    again = dict(chat.ask(prompt, lambda side, piece: None))
    assert set(again) == set(Side)
    chat.begin()
    assert dict(chat.ask(prompt, lambda side, piece: None)) == replies
    samplings = [ChatSampling(max_tokens=12, temperature=2.0, seed=seed) for seed in (1, 1, 2, 3)]
    drawn = [dict(Chat(speaker, one).ask(prompt, lambda side, piece: None)) for one in samplings]
    assert drawn[0] == drawn[1]
    assert drawn[2:] != drawn[:2], "draws depend on the seed"


def test_a_conversation_that_does_not_fit_any_more_is_told(speaker):
    chat = Chat(speaker, ChatSampling(max_tokens=4, temperature=None))
    with pytest.raises(InvalidInput, match="start a new one with /new"):
        list(chat.ask("a" * 100_000, lambda side, piece: None))


def test_what_is_no_adapter_is_told(model, tmp_path):
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(InvalidInput, match="cannot be loaded onto the base model"):
        ModelSpeaker(model, tmp_path)


@pytest.fixture
def chat() -> Chat:
    """The base counts what it has heard, the adapter echoes it."""
    answers = {Side.BASE: lambda said: f"{len(said)} so far", Side.ADAPTER: lambda said: said[-1][1]}
    return Chat(ScriptedSpeaker(answers), ChatSampling(max_tokens=5, temperature=1.0))


def test_each_side_gets_the_question_and_goes_on_with_its_own_replies(chat):
    pieces = []
    replies = dict(chat.ask("hello there", lambda side, piece: pieces.append((side, piece))))
    assert replies == {Side.BASE: "1 so far", Side.ADAPTER: "hello there"}
    assert pieces == [("base", "1"), ("base", " so"), ("base", " far"), ("adapter", "hello"), ("adapter", " there")]
    assert dict(chat.ask("again", lambda side, piece: None))[Side.BASE] == "3 so far"
    assert chat.transcripts[Side.ADAPTER][1] == ("assistant", "hello there")
    assert chat.transcripts[Side.BASE][1] == ("assistant", "1 so far")
    chat.begin()
    assert dict(chat.ask("new", lambda side, piece: None))[Side.BASE] == "1 so far"


@pytest.mark.parametrize("terminal", [True, False])
def test_replies_stand_side_by_side_and_cannot_drive_the_terminal(terminal):
    console = Console(file=io.StringIO(), width=60, force_terminal=terminal, color_system=None)
    with Columns(console, {Side.BASE: "tiny", Side.ADAPTER: "trained"}) as columns:
        columns.append(Side.BASE, "one\x1b[2J")
        columns.append(Side.ADAPTER, "[bold]two[/bold]")
    lines = console.file.getvalue().splitlines()
    assert any("tiny" in line and "trained" in line for line in lines)
    assert any("one\\x1b[2J" in line and "[bold]two[/bold]" in line for line in lines)
