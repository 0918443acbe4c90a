"""The jobs of manifests whose environment is a data set, with what `marlaas data show` needs of their pools' models."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from marlaas.environment_types import Message
from marlaas.envs import DATASET, suite_args
from marlaas.manifest.loading import LoadedManifest, load
from marlaas.manifest.models import model_folder
from marlaas.manifest.references import anchored_job, anchored_pool
from marlaas.manifest.templates import chosen_template
from marlaas.models.chat_template import Render, frame_of, reply_in, split_end
from marlaas.models.chosen_template import light_renderer
from marlaas.models.end_tokens import read_ends
from marlaas.models.errors import ModelError
from marlaas_api.errors import InvalidInput
from marlaas_api.kinds import ModelPool, RLJob
from marlaas_api.kinds.agent import SftSpec
from marlaas_api.kinds.training import SuiteSpec

_TOKENIZER = "tokenizer.json"


@dataclass(frozen=True, slots=True)
class TrainedReply:
    """A demonstrated reply as it is trained: its text with the end token, and its tokens. problem: why it cannot be; else empty."""

    text: str
    num_tokens: int
    problem: str = ""


@dataclass(frozen=True, slots=True)
class PromptReader:
    """The chat template and the tokenizer of a pool's model. ends: texts of the tokens that end a reply."""

    render: Render
    tokenizer: Any
    ends: tuple[str, ...]

    def count(self, messages: Sequence[Mapping[str, Any]]) -> int:
        """Return the tokens of a prompt, with the chat template and the beginning of the reply."""
        return self._tokens(self.render(messages, True))

    def trained(self, conversation: Sequence[Message]) -> list[TrainedReply]:
        """Return the demonstrated replies of a conversation, as `marlaas_worker.rollout.demonstrated` has them."""
        opening = frame_of(self.render).opening
        return [self._trained(conversation[: at + 1], opening) for at, one in enumerate(conversation) if _is_reply(one)]

    def _trained(self, conversation: Sequence[Message], opening: str) -> TrainedReply:
        plain, reasoning = [_plain(one) for one in conversation], conversation[-1].reasoning
        prompt = self.render(plain[:-1], True)
        begun = opening if prompt.endswith(opening) else ""
        rendered = reply_in(self.render(plain, False), prompt, begun, reasoning)
        if rendered is None:
            return TrainedReply("", 0, "the chat template writes a reply in another way than it prompts for one")
        text, end = split_end(rendered, self.ends)
        return TrainedReply(text + (end or ""), self._tokens(text) + 1)

    def _tokens(self, text: str) -> int:
        return len(self.tokenizer.encode(text, add_special_tokens=False).ids)


def _is_reply(message: Message) -> bool:
    return message.role == "assistant"


def _plain(message: Message) -> dict[str, Any]:
    calls = [
        {"type": "function", "id": one.id, "function": {"name": one.name, "arguments": json.loads(one.arguments)}}
        for one in message.tool_calls
    ]
    plain: dict[str, Any] = {"role": message.role, "content": message.content, "tool_calls": calls}
    plain |= {"name": message.name, "tool_call_id": message.tool_call_id}
    plain |= {"reasoning_content": message.reasoning, "thinking": message.reasoning}
    return {key: value for key, value in plain.items() if value or key == "content"}


@dataclass(frozen=True, slots=True)
class DataJob:
    """A job on a data set, or one whose first steps are supervised fine-tuning on a data set.

    job: its files are read from the manifest's folder. pool: of its agent; None: not in the files. reader: None if the tokenizer of the
    pool's model is not on this machine. sft: if it is the data set of `initFrom.sft`. suite: if it is that of a suite.
    """

    job: RLJob
    folder: Path
    pool: ModelPool | None
    reader: PromptReader | None
    sft: SftSpec | None = None
    suite: SuiteSpec | None = None

    @property
    def name(self) -> str:
        """Namespace and name."""
        name = f"{self.job.metadata.namespace}/{self.job.metadata.name}"
        if self.suite is not None:
            return f"{name} suite {self.suite.name}"
        return name if self.sft is None else f"{name} initFrom.sft"

    @property
    def demonstrates(self) -> bool:
        """Whether the job trains what the rows demonstrate."""
        return self.sft is not None or (self.suite is None and self.job.spec.training.algorithm == "sft")

    @property
    def args(self) -> dict[str, Any]:
        """The arguments of the data set."""
        if self.suite is not None and self.suite.environment is not None:
            return suite_args(self.suite.environment.name, self.suite.environment.args)
        return self.job.spec.environment.args if self.sft is None else self.sft.data

    @property
    def max_tokens(self) -> int:
        """Most tokens of a reply."""
        own = None if self.suite is None else self.suite.max_tokens
        return own or self.job.spec.rollout.max_tokens


def data_jobs(paths: Sequence[str]) -> list[DataJob]:
    """Return the jobs on data sets. Raises InvalidManifest; InvalidInput: there is none."""
    manifest = load(paths, runnable=False, environments=False)
    placed = zip(manifest.jobs, manifest.folders, strict=True)
    found = [one for job, folder in placed for one in _data_jobs(manifest, job, folder)]
    if not found:
        raise InvalidInput(f"no RLJob in {', '.join(paths)} has the environment '{DATASET}'")
    return found


def _data_jobs(manifest: LoadedManifest, job: RLJob, folder: Path) -> Iterator[DataJob]:
    names = {agent.pool_ref.name for agent in job.spec.agents if agent.pool_ref is not None}
    named = {*names, *([job.spec.pool_ref.name] if job.spec.pool_ref is not None else [])}
    pool = next((anchored_pool(one, folder) for one in manifest.pools if one.metadata.name in named), None)
    job = anchored_job(job, folder)
    given = (agent.init_from.sft for agent in job.spec.agents if agent.init_from is not None)
    sets: list[tuple[SftSpec | None, SuiteSpec | None]] = [(None, None)] if job.spec.environment.name == DATASET else []
    sets += [(sft, None) for sft in given if sft is not None]
    suites = [one for one in job.spec.evaluation.suites if one.environment and one.environment.name == DATASET]
    sets += [(None, suite) for suite in suites]
    reader = None if pool is None or not sets else _reader(job, pool)
    return (DataJob(job, folder, pool, reader, sft, suite) for sft, suite in sets)


def _reader(job: RLJob, pool: ModelPool) -> PromptReader | None:
    """Return the reader of prompts; None if the model is not on this machine or has no such files."""
    try:
        folder = model_folder(pool.spec.model, runnable=False)
        if folder is None or not (folder / _TOKENIZER).is_file():
            return None
        render = light_renderer(folder, chosen_template(job, pool, folder))
        from tokenizers import Tokenizer
    except (ModelError, ImportError):
        return None
    if render is None:
        return None
    tokenizer = Tokenizer.from_file(str(folder / _TOKENIZER))
    ends = read_ends(folder, frame_of(render))
    texts = (tokenizer.id_to_token(one) for one in sorted(ends.ids))
    return PromptReader(render, tokenizer, tuple(text for text in texts if text))
