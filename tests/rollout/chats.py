"""Tokenizers with chat templates of every kind, and what is said with them."""

from tests.tables import data
from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend
from transformers import PreTrainedTokenizerFast

from marlaas_api.messages import ChatMessage, StopReason
from marlaas_worker.rollout.conversation import conclude, read_reply
from marlaas_worker.rollout.tokenizer import PretrainedTokenizer

TEMPLATES = data(__file__, "chat_templates")
CHATML = TEMPLATES["CHATML"]
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
