"""Tokenizers with chat templates of every kind, and what is said with them."""

from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend
from transformers import PreTrainedTokenizerFast

from marlaas_api.messages import ChatMessage, StopReason
from marlaas_worker.rollout.conversation import conclude, read_reply
from marlaas_worker.rollout.tokenizer import PretrainedTokenizer

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
FORGETS_REASONING = CHATML.replace("m.content", "m.content.split('</think>')[-1]")
TRIMS = CHATML.replace("m.content", "m.content | trim")
OPENS_REASONING = CHATML.replace("assistant\n{% endif", "assistant\n<think>\n{% endif")
DROPS_REASONING = OPENS_REASONING.replace("m.content", "m.content.split('</think>')[-1]")
_BLOCK = "{% if m.role == 'assistant' and loop.last %}<think>\n\n</think>\n\n{% endif %}{{ m.content }}"
WRITES_AN_EMPTY_BLOCK = OPENS_REASONING.replace("{{ m.content }}", _BLOCK)
ALTERNATES = "{% if messages[-1].role != 'user' %}{{ raise_exception('users last') }}{% endif %}" + CHATML
SHOUTS = CHATML.replace("m.content", "m.content | upper")
COUNTS_MESSAGES = "{{ messages | length }}" + CHATML
SHOUTS_LATER = CHATML.replace("m.content", "(m.content if loop.index > messages | length - 2 else m.content | upper)")
_CALLS = "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.arguments.a }}</tool_call>{% endfor %}<|im_end|>\n{% endfor %}"
SHOWS_TOOLS = "{% if tools %}{{ tools | tojson }}{% endif %}" + CHATML.replace("<|im_end|>\n{% endfor %}", _CALLS)


SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


def bpe(template, special=SPECIAL, added=(), end="<|im_end|>", **settings):
    """A tokenizer with a template. added: tokens that are not special, as many families' marks."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    bytes_ = {"initial_alphabet": pre_tokenizers.ByteLevel.alphabet(), "show_progress": False}
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=list(special), **bytes_)
    backend.train_from_iterator(["the tool answers three plus fourteen user assistant system"] * 8, trainer)
    backend.add_tokens([AddedToken(text, normalized=False) for text in added])
    tokens = {"eos_token": end, **settings}
    return PretrainedTokenizer(PreTrainedTokenizerFast(tokenizer_object=backend, **tokens, chat_template=template))


def user(content):
    return (ChatMessage(role="user", content=content),)


def assistant(content, **fields):
    return ChatMessage(role="assistant", content=content, **fields)


def reply_to(tokenizer, prompt, output, stop=StopReason.STOP):
    return conclude(prompt, read_reply(tokenizer, output, stop), output, stop)


def say(tokenizer, text, end="<|im_end|>"):
    return [*tokenizer.encode(text), *tokenizer.encode(end)]
