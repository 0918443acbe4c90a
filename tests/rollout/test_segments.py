"""What is recorded of a conversation is what the engine was fed, whatever its template does to the past."""

import random
from dataclasses import dataclass, field

import pytest
from tests.rollout.chats import (
    CHATML,
    COUNTS_MESSAGES,
    FORGETS_REASONING,
    TRIMS,
    WORDS,
    assert_same,
    bpe,
    recorded,
    reply_to,
    user,
)

from marlaas_api.messages import ChatMessage, StopReason, Turn
from marlaas_api.wire import unpack_ids
from marlaas_worker.rollout.conversation import Conversation, conclude, extend, read_reply, restore
from marlaas_worker.rollout.tokenizer import PretrainedTokenizer


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


@pytest.mark.parametrize("template", [CHATML, FORGETS_REASONING, TRIMS, COUNTS_MESSAGES])
def test_records_of_a_segment_are_exactly_what_the_engine_was_fed(template):
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


def test_a_segment_of_clean_replies_is_what_rendering_it_at_once_gives(tiny):
    end = tiny.encode("<|end|>")
    conversation: Conversation | None = None
    for number in range(4):
        prompt = extend(tiny, conversation, user(f"word {number}"))
        conversation = reply_to(tiny, prompt, [*tiny.encode(f"drow {number}"), *end])
    history = (*conversation.history, ChatMessage(role="assistant", content=conversation.reply))
    whole = tiny.encode(tiny.render(history))
    assert conversation.ids.tolist() == whole[: len(conversation.ids)]
