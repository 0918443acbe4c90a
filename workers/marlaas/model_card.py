"""Model card of an adapter: what its readers need to know of it, from the records of its run; and the files that lie beside it."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePath

from marlaas.adapter_folder import CARD, CONFIG, CURVE, Files, plain_files
from marlaas.local.table import number
from marlaas_api.errors import InvalidInput
from marlaas_api.messages import EvalRecord, JobDocument, Progress, StepRecord

FORMAT = "library_name: peft\npipeline_tag: text-generation"


@dataclass(frozen=True, slots=True)
class JobRecords:
    """Records of a job from which a model card is written.

    Attributes:
        document: of the job.
        progress: its last published progress; None if there is none.
        steps: records of its training steps, oldest first.
        evals: records of its evaluations, oldest first.
        has_curve: whether the folder of the card contains the plot of the training curve.
    """

    document: JobDocument
    progress: Progress | None
    steps: tuple[StepRecord, ...]
    evals: tuple[EvalRecord, ...]
    has_curve: bool


def plain_card(repository: str, config: Mapping[str, object]) -> str:
    """Return the card of an adapter without a run: its PEFT configuration says all that is known. repository: what PEFT loads it by."""
    return _card(repository, repository.rpartition("/")[2], config, [], "")


def job_card(repository: str, job: JobRecords, agent: str, config: Mapping[str, object]) -> str:
    """Return the card of an agent's adapter with its training and evaluations. config: of PEFT."""
    spec, name = job.document.spec, str(job.document.ref)
    title = f"{name}, agent {agent}" if len(spec.agents) > 1 else name
    own = "\n".join(("", "## Training", "", *_table("setting", _settings(job)), "", *_evaluations(job, agent)))
    return _card(
        repository,
        title,
        config,
        [f"tags: {json.dumps(['lora', 'marlaas', spec.training.algorithm])}", *_data_sets(job)],
        own,
    )


def base_of(config: Mapping[str, object]) -> str:
    """Return the id of the base model on the hub; empty if the adapter names a folder of one machine."""
    base = str(config.get("base_model_name_or_path") or "")
    return "" if PurePath(base).is_absolute() or base.startswith(".") else base


def files_with(adapter: Path, card: str, curve: Path | bytes | None) -> Files:
    """Return the files of an adapter's folder with its card and, if there is one, its curve."""
    return plain_files(adapter) | ({} if curve is None else {CURVE: curve}) | {CARD: card.encode()}


def own_card(adapter: Path) -> str:
    """Return the card that a user has put into an adapter's folder; empty without one."""
    return (adapter / CARD).read_text(encoding="utf-8") if (adapter / CARD).is_file() else ""


def config_of(adapter: Path) -> dict[str, object]:
    """Return PEFT's configuration of an adapter. Raises InvalidInput."""
    try:
        found = json.loads((adapter / CONFIG).read_text(encoding="utf-8"))
    except ValueError as error:
        raise InvalidInput(f"{adapter / CONFIG} is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise InvalidInput(f"{adapter / CONFIG} is no JSON object")
    return found


def _card(repository: str, title: str, config: Mapping[str, object], head: list[str], own: str) -> str:
    base = base_of(config)
    shown = f"[{base}](https://huggingface.co/{base})" if base else "a base model that is on no hub"
    return "\n".join(
        (
            *("---", *([f"base_model: {base}"] if base else []), FORMAT, *head, "---", "", f"# {title}", ""),
            f"A LoRA adapter (rank {config.get('r')}, alpha {config.get('lora_alpha')}) of {shown}, trained with MARLaaS.",
            *own.splitlines(),
            *("", "## Use", "", "```python", "from peft import AutoPeftModelForCausalLM", ""),
            *(f'model = AutoPeftModelForCausalLM.from_pretrained("{repository}")', "```", ""),
        )
    )


def _data_sets(job: JobRecords) -> list[str]:
    """Return the line that names the data set of the hub from which the tasks came."""
    source = job.document.spec.environment.args.get("source")
    found = source.get("hub") if isinstance(source, dict) else None
    return [f"datasets: {json.dumps([found])}"] if isinstance(found, str) else []


def _settings(job: JobRecords) -> Iterator[tuple[str, str]]:
    spec, steps = job.document.spec, job.steps
    training = spec.training
    yield "environment", f"`{spec.environment.name}`"
    if spec.environment.args:
        yield "arguments", f"`{json.dumps(spec.environment.args.value, sort_keys=True)}`"
    yield (
        "algorithm",
        f"{training.algorithm}, {len(steps)} steps of {training.groups_per_step} groups of {spec.group_size}",
    )
    yield "learning rate", f"{training.optimizer.learning_rate:g}"
    yield "staleness", f"at most {training.max_staleness} versions"
    yield "reply", f"at most {spec.rollout.max_tokens} tokens, temperature {spec.rollout.temperature:g}"
    yield "seed", str(job.document.seed)
    digests = sorted({digest for step in steps for digest in step.plays.data_digests})
    if digests:
        yield "SHA-256 of the data", ", ".join(f"`{one}`" for one in digests)


def _evaluations(job: JobRecords, agent: str) -> list[str]:
    """Return a table of the evaluations of version 0 and of the adapter's version: reward, suites and metrics."""
    published = {} if job.progress is None else job.progress.published
    by_version = {one.versions.get(agent, one.version): one for one in job.evals}
    version = published.get(agent, -1)
    last = by_version.get(version)
    if last is None:
        return []
    first = by_version.get(0)
    figures = [{"reward": one.reward_mean} | one.suite_figures() | one.metrics if one else {} for one in (first, last)]
    rows = [(name, " → ".join(number(one.get(name)) for one in figures)) for name in figures[1]]
    told = f"Held-out tasks: version 0, and this adapter, version {version}, after step {last.step}."
    curve = ["", f"![Reward by step]({CURVE})"] if job.has_curve else []
    return ["## Evaluation", "", told, "", *_table("figure", rows), *curve]


def _table(first: str, rows: "Iterator[tuple[str, str]] | list[tuple[str, str]]") -> list[str]:
    escaped = [(name, text.replace("|", "\\|").replace("\n", " ")) for name, text in rows]
    return [f"| {first} | |", "|---|---|", *(f"| {name} | {text} |" for name, text in escaped)]
