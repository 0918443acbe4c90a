"""Check the chat templates in effect: each pool's, and that of each job which chooses another or sets variables.

Rendering needs transformers, which is imported only for templates that were not made by us.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from marlaas.envs import BUILTINS
from marlaas.manifest.crosscheck import ManifestObjects
from marlaas.manifest.findings import Finding, Placed, Source
from marlaas.models import ModelFacts
from marlaas.models.chat_template import frame_of, lost_tokens, renderer
from marlaas.models.chosen_template import ChosenTemplate, TemplateUnusable, choose, syntax_error, unread
from marlaas.models.end_tokens import added_tokens, read_ends, special_added_tokens
from marlaas.models.families import CHATML, family_of
from marlaas.models.weight_files import read_json
from marlaas_api.documents import chat_template_settings, pool_chat_template_settings
from marlaas_api.kinds import ModelPool, RLJob
from marlaas_api.kinds.chat_template import ChatTemplateSpec
from marlaas_api.kinds.checks import pool_text
from marlaas_api.kinds.problems import Loc, Problem
from marlaas_api.messages.job_spec import PoolChatTemplateSettings

_OF_POOL: Loc = ("spec", "chatTemplate")
_OF_JOB: Loc = ("spec", "rollout", "chatTemplate")
_NO_FAMILY = (
    "the {} is of no known family: replies are read as those of ChatML models (<think>…</think>, "
    "<tool_call>{{JSON}}</tool_call>); if it writes others, put a `response_template` into its tokenizer_config.json"
)


@dataclass(frozen=True, slots=True)
class _Effective:
    """A template in effect: the object that chooses it, the field there, and its settings with those of the pool."""

    source: Source
    loc: Loc
    given: ChatTemplateSpec
    chosen: ChosenTemplate

    @property
    def is_given(self) -> bool:
        return self.given.is_given

    def finding(self, text: str) -> Finding:
        """Return a finding at the field that chooses the template."""
        return self.source.finding(Problem(self.loc, text))


def text_errors(contents: ManifestObjects) -> Iterator[Finding]:
    """Yield inline templates that Jinja cannot parse; no model is needed for that."""
    for pool in contents.pools:
        text = pool.object.spec.chat_template.text
        error = syntax_error(text) if text is not None else None
        if error is not None:
            yield pool.source.finding(Problem((*_OF_POOL, "text"), error))


def template_errors(
    contents: ManifestObjects, pool: Placed[ModelPool], folder: Path, facts: ModelFacts
) -> Iterator[Finding]:
    """Yield templates that do not exist or whose special tokens would be lost, and builtin environments without one. Raises NotAModel."""
    for one in _effective(contents, pool, folder):
        if isinstance(one, Finding):
            yield one
        elif one.is_given or pool.object.spec.model.builtin is None:
            lost = _lost(folder, one.chosen)
            yield from [one.finding(lost)] if lost else []
    yield from _untemplated(contents, pool.object, folder, facts, is_builtin=True)


def template_notes(
    contents: ManifestObjects, pool: Placed[ModelPool], folder: Path, facts: ModelFacts, *, runnable: bool
) -> Iterator[Finding]:
    """Yield variables that a template does not read, unknown families, and, unless a run's engine logs them, where replies begin and end."""
    is_ours = pool.object.spec.model.builtin is not None
    for one in _effective(contents, pool, folder):
        if isinstance(one, Finding) or (is_ours and not one.is_given):
            continue
        if (text := unread(one.chosen)) is not None:
            yield one.source.finding(Problem((*one.loc, "kwargs"), text))
        if one.chosen.is_own:
            is_unknown = facts.reads_as_chatml and one.source is pool.source
        else:
            is_unknown = _is_of_no_family(folder, one.chosen)
        if is_unknown:
            yield one.finding(_NO_FAMILY.format("model's chat template" if one.chosen.is_own else "chat template"))
        for text in () if runnable else _replies(folder, one.chosen):
            yield one.finding(text)
    yield from _untemplated(contents, pool.object, folder, facts, is_builtin=False)


def _effective(contents: ManifestObjects, pool: Placed[ModelPool], folder: Path) -> Iterator[_Effective | Finding]:
    """Yield the template of the pool, then those of jobs that choose; a template that does not exist as a finding."""
    base = pool_chat_template_settings(pool.object.spec.chat_template)
    model = pool.object.spec.model
    kind = next(name for name in ("builtin", "path", "pvc", "hub") if getattr(model, name) is not None)
    own = pool.object.spec.chat_template
    users: list[tuple[Source, Loc, ChatTemplateSpec, PoolChatTemplateSettings]] = [
        (pool.source, _OF_POOL if own.is_given else ("spec", "model", kind), own, base)
    ]
    for job in contents.jobs:
        given = job.object.spec.rollout.chat_template
        if given.is_given and job.object.spec.agents_on(pool.object.metadata.name):
            users.append((job.source, _OF_JOB, given, chat_template_settings(given).over(base)))
    for source, loc, given, settings in users:
        try:
            yield _Effective(source, loc, given, choose(settings, folder))
        except TemplateUnusable as error:
            if given.file is not None or source is pool.source:  # Else the pool's is the one that does not exist.
                yield source.finding(Problem((*loc, "text" if given.file is None else "file"), str(error)))


def chosen_template(job: RLJob, pool: ModelPool, folder: Path) -> ChosenTemplate:
    """Return the template in effect for a job on a pool; an empty text if it does not exist."""
    settings = chat_template_settings(job.spec.rollout.chat_template)
    try:
        return choose(settings.over(pool_chat_template_settings(pool.spec.chat_template)), folder)
    except TemplateUnusable:
        return ChosenTemplate("", is_own=False)  # It is told already.


def _untemplated(
    contents: ManifestObjects, pool: ModelPool, folder: Path, facts: ModelFacts, *, is_builtin: bool
) -> Iterator[Finding]:
    """Yield jobs without a chat template. Builtin environments need one; other environments may append raw text."""
    for job in () if facts.has_chat_template else contents.jobs:
        if not job.object.spec.agents_on(pool.metadata.name) or not chosen_template(job.object, pool, folder).is_own:
            continue
        for loc, name in _environments(job.object):
            if (name in BUILTINS) != is_builtin:
                continue
            text = f"the base model of {pool_text(job.object, pool.metadata.name)} has no chat template, so "
            text += (
                f"the environment '{name}' cannot send it messages; choose a chat model, or set rollout.chatTemplate: {{name: chatml}}"
                if is_builtin
                else "the environment cannot send it messages (`agent.say`, `agent.ask`), only raw text (`agent.complete`); "
                "rollout.chatTemplate: {name: chatml} gives it one"
            )
            yield job.source.finding(Problem(loc, text))


def _environments(job: RLJob) -> Iterator[tuple[Loc, str | None]]:
    """Yield place and name of the job's environment and of those of its suites."""
    yield ("spec", "environment"), job.spec.environment.name
    for at, suite in enumerate(job.spec.evaluation.suites):
        if suite.environment is not None:
            yield ("spec", "evaluation", "suites", at, "environment"), suite.environment.name


def _lost(folder: Path, chosen: ChosenTemplate) -> str:
    """Return the sentence about special tokens that would be lost, as a worker refuses it; empty if none would be."""
    if chosen.text is None or chosen.is_builtin or _has_reader(folder):
        return ""
    if family_of(chosen.text, added_tokens(folder) or None) not in (None, CHATML):
        return ""
    render = renderer(folder, chosen.text, chosen.kwargs)
    return "" if render is None else lost_tokens(render, special_added_tokens(folder))


def _is_of_no_family(folder: Path, chosen: ChosenTemplate) -> bool:
    return bool(chosen.text) and not _has_reader(folder) and family_of(str(chosen.text), added_tokens(folder)) is None


def _has_reader(folder: Path) -> bool:
    file = folder / "tokenizer_config.json"
    return file.is_file() and bool(read_json(file).get("response_template"))


def _replies(folder: Path, chosen: ChosenTemplate) -> Iterator[str]:
    """Yield sentences about the begin and the end of replies."""
    render = renderer(folder, chosen.text, chosen.kwargs)
    frame = None if render is None else frame_of(render)
    ends = read_ends(folder, frame)
    if frame is not None and frame.problem:
        yield frame.problem
    yield from ends.notes if ends.by_place else ends.problems
