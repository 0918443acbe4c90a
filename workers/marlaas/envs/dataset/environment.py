"""`dataset`: every row of a data set is a task of one turn; the manifest says how it becomes a prompt, a truth and a reward."""

import contextlib
import os
import signal
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from marlaas.environment import Agents, Message, Play, Score, Task
from marlaas.envs import data_digest
from marlaas.envs.dataset.fields import Fields
from marlaas.envs.dataset.index import forked, indexed, may_fork
from marlaas.envs.dataset.judge import player
from marlaas.envs.dataset.problems import InvalidArgument, InvalidRows
from marlaas.envs.dataset.rewards import Rewards
from marlaas.envs.dataset.settings import Settings, Source, parsed
from marlaas.envs.dataset.sources import files_of, sources_of
from marlaas.envs.dataset.tasks import Rows, TaskRow, Tasks, divided, separate
from marlaas_api.errors import InvalidInput


class Dataset:
    """Tasks from the rows of files, of objects of a bucket, or of a data set of the Hugging Face hub, in one turn each.

    Args:
        source: {files: "data/*.jsonl"} (.jsonl, .csv, .parquet; .gz), {s3: "s3://bucket/*.jsonl"}, or {hub: org/name, config, split,
            revision}.
        rewards: list of parts, each with a weight: math, answer, format, code, python, judge, cosine, shorter, group. Absent: replies are
            not scored.
        prompt: list of {role, content}; content is a Jinja template of the row's columns.
        messages: instead of prompt, the column that holds a list of messages. An assistant's message at the end is a demonstrated reply,
            and no part of the prompt.
        truth: Jinja template of the right answer.
        completion: Jinja template of the demonstrated reply to prompt, for supervised fine-tuning.
        held_out: {share: 0.1}, {files: …}, {s3: …} or {split: test}; absent: one row in eight, by a hash of its prompt. With {share: 1} nothing is
            trained.
    """

    def __init__(  # noqa: PLR0913
        self,
        source: dict[str, Any],
        rewards: list[Any] | None = None,
        prompt: list[Any] | None = None,
        messages: str | None = None,
        truth: str = "",
        completion: str = "",
        held_out: dict[str, Any] | None = None,
    ) -> None:
        self.settings = parsed(
            {
                "source": source,
                "rewards": rewards,
                "prompt": prompt,
                "messages": messages,
                "truth": truth,
                "completion": completion,
                "held_out": held_out,
            }
        )
        with _indexing(self.settings):
            self.rewards = Rewards(self.settings) if self.settings.rewards else None
        self.tasks = tasks_of(self.settings)
        self.notes = notes_of(self.tasks)
        self.data_digest = data_digest(one.sha256 for one in self.tasks.files())

        if self.rewards is not None and self.rewards.compares:
            self.score_group = self._score_group

    @staticmethod
    def agents(**args: Any) -> tuple[str, ...]:
        """Return the agents that the job must have: the judge, if it is one of the job's."""
        judge = _judge_of(parsed(args))
        return () if judge is None else (judge,)

    @staticmethod
    def check_agents(agents: Sequence[str], **args: Any) -> None:
        """Raise UnknownAgent unless the job has one agent beside the judge."""
        player(agents, _judge_of(parsed(args)))

    def play(self, task: Task, agents: Agents) -> Score:
        """Ask for a reply to the row's prompt, and score it."""
        agent = agents[player(agents, _judge_of(self.settings))]
        judge = None if self.rewards is None else self.rewards.judge
        found = self._row(task)
        task.drawn.append(found.rendered.text)
        if self.rewards is None:
            raise InvalidInput(
                "the data set has no rewards, so replies cannot be scored: give rewards, or set evaluation.tasks: 0"
            )
        reply = agent.ask(found.rendered.prompt)
        score = self.rewards.score(reply, found, None if judge is None else judge.asks(agents))
        return replace(score, reward={agent.name: score.reward})  # type: ignore[dict-item]

    def _score_group(self, task: Task, plays: Sequence[Play]) -> list[Score]:
        assert self.rewards is not None
        agent = player(plays[0].rewards, _judge_of(self.settings))
        return self.rewards.compare(plays, self._row(task), agent)

    def _row(self, task: Task) -> TaskRow:
        return self.tasks.part(task.split).task(task.index)

    def demonstrate(self, task: Task) -> tuple[Message, ...]:
        """Return the row's conversation, of which the assistant's messages are demonstrated.

        Raises:
            InvalidInput: rows demonstrate nothing; InvalidRows: of those in files, some do not.
        """
        if not self.settings.completion and self.settings.messages is None:
            text = "the data set demonstrates nothing: give completion, a template of the reply, or messages, a column with the assistant's messages"
            raise InvalidArgument(text, "completion")
        self.tasks.part(task.split).require_demonstrations()
        found = self._row(task)
        task.drawn.append(found.rendered.text)
        return found.rendered.conversation


def _judge_of(settings: Settings) -> str | None:
    """Return the agent of the job that judges; None if there is none."""
    return next((one.judge.agent for one in settings.rewards if one.judge is not None), None)


@contextlib.contextmanager
def _indexing(settings: Settings) -> Iterator[None]:
    """Have a child process fill the cache with the indices of local files, if math-verify is imported in this context: both take seconds."""
    is_local = all(source.files is not None for source, _ in sources_of(settings))
    if not may_fork() or not is_local or all(one.math is None for one in settings.rewards):
        yield
        return
    try:
        pid = forked(partial(_index_ahead, settings))  # what it raises is raised here, too, when the files are read
    except OSError:
        yield
        return
    with contextlib.suppress(OSError):
        os.setpgid(pid, pid)
    try:
        yield
        os.waitpid(pid, 0)
    except BaseException:  # Ctrl-C, too: the child has a process group of its own
        with contextlib.suppress(OSError):
            os.killpg(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        raise


def _index_ahead(settings: Settings) -> None:
    with contextlib.suppress(OSError):
        os.setpgid(0, 0)  # its own children end with it
    tasks_of(settings)


def tasks_of(settings: Settings) -> Tasks:
    """Return the tasks of a data set. Raises InvalidInput: files, templates or rows cannot be used."""
    fields = Fields(settings)
    rows, *other = [_rows(source, fields, name) for source, name in sources_of(settings)]
    if other:
        return separate(rows, other[0])
    return divided(rows, None if settings.held_out is None else settings.held_out.share)


def _rows(source: Source, fields: Fields, *loc: str) -> Rows:
    try:
        return Rows([indexed(file, fields) for file in files_of(source, *loc)], fields)
    except InvalidRows as error:
        error.loc = (*loc, *(name for name in ("files", "s3") if getattr(source, name) is not None))
        raise


def notes_of(tasks: Tasks) -> tuple[str, ...]:
    """Return what a user should know of the tasks before they are played."""
    if not tasks.num_dropped:
        return ()
    return (
        f"{tasks.num_dropped} training rows are left out, because their prompts stand among the held-out rows too; {len(tasks.train)} are left",
    )
