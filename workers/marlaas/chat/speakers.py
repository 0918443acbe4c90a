"""Speakers: a base model with a switchable adapter, and a fake.

`ModelSpeaker` imports transformers and peft when it is created. Sampling is the same as in training: a temperature,
and no top-p, top-k or penalties. It ignores the model's own generation settings.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from marlaas.chat.conversations import ChatSampling, Side, Transcript
from marlaas.models.chat_template import PlainMessage, ReplyFrame, closing_token, frame_of
from marlaas.models.chosen_template import choose
from marlaas_api.errors import InvalidInput
from marlaas_api.messages.job_spec import PoolChatTemplateSettings


@dataclass(frozen=True, slots=True)
class ScriptedSpeaker:
    """Fake speaker: each side's reply is a function of the conversation, emitted word by word."""

    answers: Mapping[Side, Callable[[Transcript], str]]

    def reply(self, side: Side, transcript: Transcript, sampling: ChatSampling, on_text: Callable[[str], None]) -> str:
        """Reply with at most `max_tokens` words."""
        words = self.answers[side](transcript).split(" ")[: sampling.max_tokens]
        for at, word in enumerate(words):
            on_text(word if at == 0 else f" {word}")
        return " ".join(words)


class ModelSpeaker:
    """A base model folder in Hugging Face format with a PEFT folder. Raises InvalidInput if they cannot be loaded together.

    template: of the job whose adapter it is.
    """

    def __init__(self, model: Path, adapter: Path, template: PoolChatTemplateSettings | None = None) -> None:
        try:
            import torch
            from peft import PeftModel
            from transformers import AutoModelForCausalLM, AutoTokenizer
            from transformers.utils.logging import disable_progress_bar
        except ImportError as error:
            raise InvalidInput(f"chat needs the Python package {error.name}: pip install 'marlaas[worker]'") from error
        disable_progress_bar()
        device = "cuda" if torch.cuda.is_available() else "cpu"
        dtype = torch.bfloat16 if device == "cuda" else torch.float32
        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(model)
            base = AutoModelForCausalLM.from_pretrained(model, dtype=dtype, local_files_only=True)
            self._model: Any = PeftModel.from_pretrained(base, str(adapter)).eval().to(device)
        except (OSError, ValueError, KeyError, RuntimeError) as error:
            raise InvalidInput(
                f"the adapter {adapter} cannot be loaded onto the base model {model}: {error}"
            ) from error
        chosen = choose(template or PoolChatTemplateSettings(), model)
        if not chosen.is_own:
            self._tokenizer.chat_template = chosen.text
        self._kwargs = dict(chosen.kwargs)
        frame = ReplyFrame() if self._tokenizer.chat_template is None else frame_of(self._rendered)
        self._closing = closing_token(frame, self._tokenizer.get_added_vocab())
        self._torch = torch

    def reply(self, side: Side, transcript: Transcript, sampling: ChatSampling, on_text: Callable[[str], None]) -> str:
        """Generate a reply and pass its text to `on_text` as it is decoded."""
        ids = self._ids(transcript)
        room = self._room(ids.shape[1])
        pieces = _Pieces(self._tokenizer, ids.shape[1], on_text)
        self._torch.manual_seed(sampling.seed)
        with self._model.disable_adapter() if side is Side.BASE else nullcontext(), self._torch.inference_mode():
            self._model.generate(
                input_ids=ids,
                attention_mask=self._torch.ones_like(ids),
                generation_config=self._settings(sampling, room),
                streamer=pieces,
            )
        return pieces.text

    def _ids(self, transcript: Transcript) -> Any:
        messages = [{"role": role, "content": text} for role, text in transcript]
        if self._tokenizer.chat_template is None:
            text = "\n".join(message["content"] for message in messages)
        else:
            text = self._rendered(messages, True)
        ids = self._tokenizer(text, add_special_tokens=False, return_tensors="pt").input_ids
        return ids.to(self._model.device)

    def _rendered(self, messages: Sequence[PlainMessage], prompts: bool) -> str:
        given = {"tokenize": False, "add_generation_prompt": prompts, **self._kwargs}
        return str(self._tokenizer.apply_chat_template(list(messages), **given))

    def _room(self, num_prompt: int) -> int:
        """Return the number of tokens left in the context. Raises InvalidInput if there are none."""
        context = int(getattr(self._model.config, "max_position_embeddings", 1 << 20))
        if num_prompt >= context:
            raise InvalidInput(
                f"the conversation has {num_prompt} tokens, and the model's context holds {context}: start a new one with /new"
            )
        return context - num_prompt

    def _settings(self, sampling: ChatSampling, room: int) -> Any:
        from transformers import GenerationConfig

        own = self._model.generation_config
        named = own.eos_token_id if isinstance(own.eos_token_id, list) else [own.eos_token_id]
        all_ends = sorted({one for one in (*named, self._closing) if one is not None})
        ends = {"eos_token_id": all_ends or None, "pad_token_id": own.pad_token_id}
        if ends["pad_token_id"] is None:
            ends["pad_token_id"] = self._tokenizer.eos_token_id
        drawn = {"do_sample": True, "temperature": sampling.temperature, "top_k": 0, "top_p": 1.0}
        way = {"do_sample": False} if sampling.temperature is None else drawn
        return GenerationConfig(**ends, **way, max_new_tokens=min(sampling.max_tokens, room))


class _Pieces:
    """Streamer for `generate`: passes decoded text on as soon as it is final.

    `text` holds all of it, without special tokens.
    """

    def __init__(self, tokenizer: Any, num_prompt: int, on_text: Callable[[str], None]) -> None:
        self._tokenizer = tokenizer
        self._left = num_prompt
        self._on_text = on_text
        self._ids: list[int] = []
        self.text = ""

    def put(self, value: Any) -> None:
        """Add generated tokens. The first tokens are the prompt and are skipped."""
        ids = value.flatten().tolist()
        skipped = min(self._left, len(ids))
        self._left -= skipped
        if skipped == len(ids):
            return
        self._ids += ids[skipped:]
        text = self._decoded()
        if not text.endswith("\ufffd"):  # half a character: wait for its other bytes
            self._say(text)

    def end(self) -> None:
        """Pass on the remaining text."""
        self._say(self._decoded())

    def _decoded(self) -> str:
        return str(self._tokenizer.decode(self._ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))

    def _say(self, text: str) -> None:
        if len(text) > len(self.text):
            self._on_text(text[len(self.text) :])
        self.text = text
