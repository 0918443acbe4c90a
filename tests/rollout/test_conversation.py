import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from marlaas.models.tokenizer import VOCABULARY, save_tokenizer
from marlaas_api.arrays import pack_ids, pack_logprobs, unpack_ids
from marlaas_api.messages import ChatMessage, Meter, StopReason, ToolCall, Turn
from marlaas_worker.rollout.conversation import (
    BadAppend,
    Conversation,
    Prompt,
    conclude,
    extend,
    read_reply,
    restore,
)
from marlaas_worker.rollout.templates import rewritten
from marlaas_worker.rollout.tokenizer import PretrainedTokenizer, TokenizerUnreadable

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
FORGETS_REASONING = CHATML.replace("m.content", "m.content.split('</think>')[-1]")
TRIMS = CHATML.replace("m.content", "m.content | trim")
COUNTS_MESSAGES = "{{ messages | length }}" + CHATML
WORDS = ["tool", "three", "plus", " 14", "\n", " ", "é", "</think>", "stop", "<|im_end|>", "the", " answer"]


def bpe(template: str | None) -> PretrainedTokenizer:
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(["the tool answers three plus fourteen user assistant system"] * 8, trainer)
    return PretrainedTokenizer(
        PreTrainedTokenizerFast(
            tokenizer_object=backend,
            eos_token="<|im_end|>",
            additional_special_tokens=special,
            chat_template=template,
        )
    )


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> PretrainedTokenizer:
    folder: Path = tmp_path_factory.mktemp("tiny")
    save_tokenizer(folder, 512)
    return PretrainedTokenizer.load(str(folder))


@pytest.fixture(scope="module")
def chatml() -> PretrainedTokenizer:
    return bpe(CHATML)


def user(content: str) -> tuple[ChatMessage, ...]:
    return (ChatMessage(role="user", content=content),)


def reply_to(
    tokenizer: PretrainedTokenizer, prompt: Prompt, output: Sequence[int], stop: StopReason = StopReason.STOP
) -> Conversation:
    return conclude(prompt, read_reply(tokenizer, output, stop), output, stop)


def say(tokenizer: PretrainedTokenizer, text: str, end: str = "<|im_end|>") -> list[int]:
    return [*tokenizer.encode(text), *tokenizer.encode(end)]


def test_the_first_turn_is_the_rendered_template(chatml: PretrainedTokenizer) -> None:
    prompt = extend(chatml, None, user("three plus 14"))
    assert prompt.draft.opens_segment
    rendered = "<|im_start|>user\nthree plus 14<|im_end|>\n<|im_start|>assistant\n"
    assert prompt.ids.tolist() == chatml.encode(rendered)


def test_after_an_end_token_only_what_the_template_adds_is_appended(chatml: PretrainedTokenizer) -> None:
    first = extend(chatml, None, user("three"))
    second = extend(chatml, reply_to(chatml, first, say(chatml, "the tool")), user("plus"))
    assert not second.draft.opens_segment
    assert second.appended.tolist() == chatml.encode("\n<|im_start|>user\nplus<|im_end|>\n<|im_start|>assistant\n")
    assert second.past.tolist() == [*first.ids.tolist(), *say(chatml, "the tool")]


def test_a_reply_cut_by_length_is_closed_by_the_template_as_prompt(chatml: PretrainedTokenizer) -> None:
    cut = reply_to(chatml, extend(chatml, None, user("three")), chatml.encode("the to"), StopReason.LENGTH)
    prompt = extend(chatml, cut, user("plus"))
    closing = "<|im_end|>\n<|im_start|>user\nplus<|im_end|>\n<|im_start|>assistant\n"
    assert not prompt.draft.opens_segment
    assert prompt.appended.tolist() == chatml.encode(closing)


def test_generated_ids_are_kept_even_if_their_text_would_be_tokenised_otherwise(chatml: PretrainedTokenizer) -> None:
    letter_by_letter = [token for letter in "the tool" for token in chatml.encode(letter)]
    assert letter_by_letter != chatml.encode("the tool")
    output = [*letter_by_letter, *chatml.encode("<|im_end|>")]
    prompt = extend(chatml, reply_to(chatml, extend(chatml, None, user("three")), output), user("plus"))
    assert not prompt.draft.opens_segment
    assert prompt.past.tolist()[-len(output) :] == output


def test_another_end_token_than_the_templates_opens_a_segment(chatml: PretrainedTokenizer) -> None:
    ended = reply_to(chatml, extend(chatml, None, user("three")), say(chatml, "tool", "<|endoftext|>"))
    assert extend(chatml, ended, user("plus")).draft.opens_segment


@pytest.mark.parametrize(
    ("template", "reply", "opens"),
    [
        (FORGETS_REASONING, "hm</think>three", True),
        (FORGETS_REASONING, "three", False),
        (TRIMS, " three", True),
        (TRIMS, "three", False),
        (COUNTS_MESSAGES, "three", True),
    ],
)
def test_a_template_that_rewrites_its_past_opens_a_segment_with_a_whole_prompt(
    template: str, reply: str, opens: bool
) -> None:
    tokenizer = bpe(template)
    ended = reply_to(tokenizer, extend(tokenizer, None, user("plus")), say(tokenizer, reply))
    prompt = extend(tokenizer, ended, user("14"))
    assert prompt.draft.opens_segment is opens
    history = (*user("plus"), ChatMessage(role="assistant", content=reply), *user("14"))
    if opens:
        assert prompt.ids.tolist() == tokenizer.encode(tokenizer.render(history))


def test_raw_text_is_appended_verbatim(chatml: PretrainedTokenizer) -> None:
    first = extend(chatml, None, "three plus")
    assert first.ids.tolist() == chatml.encode("three plus")
    second = extend(chatml, reply_to(chatml, first, say(chatml, " 14")), "<|im_end|> the")
    assert not second.draft.opens_segment
    assert second.appended.tolist() == chatml.encode("<|im_end|> the")


def test_chat_goes_on_after_raw_text_within_a_reply(chatml: PretrainedTokenizer) -> None:
    cut = reply_to(chatml, extend(chatml, None, user("three")), chatml.encode("the"), StopReason.LENGTH)
    forced = reply_to(chatml, extend(chatml, cut, " answer:"), say(chatml, " 14"))
    prompt = extend(chatml, forced, user("plus"))
    assert not prompt.draft.opens_segment
    assert prompt.draft.history[1].content == "the answer: 14"


def test_chat_after_a_conversation_that_began_as_raw_text_is_refused(chatml: PretrainedTokenizer) -> None:
    begun = reply_to(chatml, extend(chatml, None, "three"), say(chatml, "14"))
    with pytest.raises(BadAppend, match="began as raw text"):
        extend(chatml, begun, user("plus"))


def test_nothing_to_generate_from_is_refused(chatml: PretrainedTokenizer) -> None:
    with pytest.raises(BadAppend, match="nothing to generate from"):
        extend(chatml, None, "")
    with pytest.raises(BadAppend):
        extend(chatml, None, ())


def test_a_template_says_itself_why_it_refuses() -> None:
    with pytest.raises(BadAppend, match="only users"):
        extend(bpe("{{ raise_exception('only users') }}"), None, user("three"))
    with pytest.raises(BadAppend, match="no chat template"):
        extend(bpe(None), None, user("three"))


def test_a_folder_without_a_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(TokenizerUnreadable, match=str(tmp_path)):
        PretrainedTokenizer.load(str(tmp_path))


def test_a_reply_ends_with_the_tokenizers_end_token_or_with_one_of_the_models_own(tmp_path: Path) -> None:
    save_tokenizer(tmp_path, 512)
    own = VOCABULARY["<|end|>"]
    assert PretrainedTokenizer.load(str(tmp_path)).end_ids == {own}
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7, 9]}')
    assert PretrainedTokenizer.load(str(tmp_path)).end_ids == {own, 7, 9}


def test_the_reply_has_no_end_token_but_keeps_what_was_cut(chatml: PretrainedTokenizer) -> None:
    assert read_reply(chatml, say(chatml, "the tool"), StopReason.STOP) == "the tool"
    assert read_reply(chatml, chatml.encode("the to"), StopReason.LENGTH) == "the to"
    assert read_reply(chatml, [*chatml.encode("<|im_start|>"), *say(chatml, "a")], StopReason.STOP) == "a"


def test_room_counts_what_was_and_what_is_appended(tiny: PretrainedTokenizer) -> None:
    first = extend(tiny, None, user("abc"))
    assert first.room(10) == 10 - len(tiny.encode("<|user|>abc<|end|><|assistant|>"))
    overflow = reply_to(tiny, first, [], StopReason.CONTEXT)
    assert overflow.full
    assert extend(tiny, overflow, "x").room(10_000) == 0


@dataclass
class Play:
    """A random conversation tree, each turn as it would be recorded, and what the engine was fed."""

    tokenizer: PretrainedTokenizer
    rng: random.Random
    states: list[Conversation] = field(default_factory=list)
    records: list[Turn] = field(default_factory=list)
    fed: list[list[int]] = field(default_factory=list)

    def turn(self, raw: bool) -> None:
        parent = self.rng.choice([*range(len(self.states))]) if self.states else None
        append = self._text() if raw else tuple(self._message() for _ in range(self.rng.randint(1, 3)))
        prompt = extend(self.tokenizer, None if parent is None else self.states[parent], append)
        output, stop = self._generate()
        text = read_reply(self.tokenizer, output, stop)
        self.fed.append(prompt.ids.tolist())
        self.states.append(conclude(prompt, text, output, stop))
        self.records.append(recorded(len(self.records), parent, append, prompt, output, stop, text))

    def segment(self, number: int) -> list[int]:
        """Ids of the records of a turn's segment, its own output left out."""
        turn = self.records[number]
        ids: list[int] = unpack_ids(turn.prompt_ids).tolist()
        while not turn.opens_segment:
            assert turn.parent is not None
            turn = self.records[turn.parent]
            ids = unpack_ids(turn.prompt_ids).tolist() + unpack_ids(turn.output_ids).tolist() + ids
        return ids

    def restored(self, number: int) -> Conversation:
        turn = self.records[number]
        parent = None if turn.parent is None else self.restored(turn.parent)
        return restore(self.tokenizer, parent, turn)

    def _text(self) -> str:
        return "".join(self.rng.choice(WORDS) for _ in range(self.rng.randint(1, 6)))

    def _message(self) -> ChatMessage:
        return ChatMessage(role=self.rng.choice(("user", "tool", "system")), content=self._text())

    def _generate(self) -> tuple[list[int], StopReason]:
        text = self.tokenizer.encode(self._text())
        if self.rng.random() < 0.3:
            return text, StopReason.LENGTH
        return [*text, *self.tokenizer.encode("<|im_end|>")[:1]], StopReason.STOP


def recorded(
    number: int,
    parent: int | None,
    append: tuple[ChatMessage, ...] | str,
    prompt: Prompt,
    output: list[int],
    stop: StopReason,
    text: str,
) -> Turn:
    return Turn(
        namespace="team",
        job="job",
        uid="u",
        agent="policy",
        group="u-t0",
        member=0,
        episode="u-t0-0-1",
        turn=number,
        parent=parent,
        version=0,
        adapter_sha256="",
        opens_segment=prompt.draft.opens_segment,
        append=append,
        prompt_ids=pack_ids(prompt.appended),
        output_ids=pack_ids(output),
        logprobs=pack_logprobs([0.0] * len(output)),
        text=text,
        stop_reason=stop,
        temperature=1.0,
        meter=Meter(prompt_tokens=len(prompt.ids), output_tokens=len(output)),
        replica="r",
        at=0.0,
    )


@pytest.mark.parametrize("template", [CHATML, FORGETS_REASONING, TRIMS, COUNTS_MESSAGES])
def test_records_of_a_segment_are_exactly_what_the_engine_was_fed(template: str) -> None:
    tokenizer = bpe(template)
    segments = 0
    for seed in range(250):
        play = Play(tokenizer, random.Random(seed))
        began_raw = seed % 5 == 0
        for _ in range(play.rng.randint(1, 6)):
            play.turn(raw=began_raw or (bool(play.states) and play.rng.random() < 0.2))
        for number, fed in enumerate(play.fed):
            assert play.segment(number) == fed
            assert_same(play.restored(number), play.states[number])
        segments += sum(turn.opens_segment for turn in play.records) - 1
    assert (segments == 0) == (template is CHATML)


def assert_same(one: Conversation, other: Conversation) -> None:
    assert np.array_equal(one.ids, other.ids)
    assert (one.tools, one.history, one.reply, one.text, one.end, one.full) == (
        other.tools,
        other.history,
        other.reply,
        other.text,
        other.end,
        other.full,
    )


def test_a_segment_of_clean_replies_is_what_rendering_it_at_once_gives(tiny: PretrainedTokenizer) -> None:
    end = tiny.encode("<|end|>")
    conversation: Conversation | None = None
    for number in range(4):
        prompt = extend(tiny, conversation, user(f"word {number}"))
        conversation = reply_to(tiny, prompt, [*tiny.encode(f"drow {number}"), *end])
    assert conversation is not None
    history = (*conversation.history, ChatMessage(role="assistant", content=conversation.reply))
    whole = tiny.encode(tiny.render(history))
    assert conversation.ids.tolist() == whole[: len(conversation.ids)]


@pytest.mark.parametrize(
    ("template", "num_found", "words"),
    [
        (CHATML, 0, ""),
        (FORGETS_REASONING, 1, "reasoning"),
        (TRIMS, 1, "spaces"),
        (COUNTS_MESSAGES, 4, "any reply"),
        (None, 0, ""),
    ],
)
def test_a_template_that_rewrites_its_past_is_told_beforehand(template: str | None, num_found: int, words: str) -> None:
    found = rewritten(bpe(template))
    assert len(found) == num_found
    assert words in " ".join(found)


def test_a_template_that_rewrites_the_reply_before_the_last_is_told_as_well() -> None:
    keeps_last = CHATML.replace("m.content", "(m.content if loop.index > messages | length - 2 else m.content | upper)")
    assert "any reply" in rewritten(bpe(keeps_last))


def test_templates_of_the_builtin_models_keep_their_past(tiny: PretrainedTokenizer) -> None:
    assert rewritten(tiny) == ()


SHOWS_TOOLS = "{% if tools %}{{ tools | tojson }}{% endif %}" + CHATML.replace(
    "<|im_end|>\n{% endfor %}",
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.arguments.a }}</tool_call>{% endfor %}<|im_end|>\n{% endfor %}",
)
TOOL = '{"type": "function", "function": {"name": "add", "parameters": {}}}'


def test_tools_are_shown_from_when_they_are_given_and_others_are_another_past() -> None:
    tokenizer = bpe(SHOWS_TOOLS)
    first = extend(tokenizer, None, user("three"), (TOOL,))
    assert first.draft.text.startswith('[{"type": "function"')
    said = reply_to(tokenizer, first, say(tokenizer, '<tool_call>{"name": "add"}</tool_call>'))
    same = extend(tokenizer, said, user("plus"))
    assert (same.draft.opens_segment, same.draft.tools) == (False, (TOOL,))
    assert extend(tokenizer, said, user("plus"), (TOOL,)).ids.tolist() == same.ids.tolist()
    without = extend(tokenizer, said, user("plus"), ())
    assert without.draft.opens_segment
    assert not without.draft.text.startswith("[")


def test_tools_of_a_recorded_turn_are_those_of_its_conversation() -> None:
    tokenizer = bpe(SHOWS_TOOLS)
    prompt = extend(tokenizer, None, user("three"), (TOOL,))
    output = say(tokenizer, "plus")
    text = read_reply(tokenizer, output, StopReason.STOP)
    turn = recorded(0, None, user("three"), prompt, output, StopReason.STOP, text).model_copy(update={"tools": (TOOL,)})
    assert_same(restore(tokenizer, None, turn), conclude(prompt, text, output, StopReason.STOP))


def test_calls_that_were_written_are_rendered_with_arguments_as_an_object() -> None:
    call = ToolCall(name="add", arguments='{"a": 14}', id="c1")
    written = ChatMessage(role="assistant", content="", tool_calls=(call,))
    answer = ChatMessage(role="tool", content="3", tool_call_id="c1")
    assert "<tool_call>14</tool_call>" in extend(bpe(SHOWS_TOOLS), None, (*user("x"), written, answer)).draft.text


def test_a_template_that_shows_no_tools_refuses_them(chatml: PretrainedTokenizer) -> None:
    with pytest.raises(BadAppend, match="shows no tools"):
        extend(chatml, None, user("three"), (TOOL,))
    with pytest.raises(BadAppend, match="refuses these messages"):
        extend(bpe(SHOWS_TOOLS), None, user("three"), ("{",))
