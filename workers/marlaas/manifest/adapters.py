"""Check adapters that jobs read (present, of the agent's rank and alpha) and export folders (writable). Weights are not read."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from marlaas.adapter_target import CONFIG, TENSORS, objection
from marlaas.manifest.findings import Finding, Placed
from marlaas_api.kinds import RLJob
from marlaas_api.kinds.agent import AgentSpec
from marlaas_api.kinds.problems import Loc, Problem


def adapter_problems(job: RLJob) -> Iterator[Problem]:
    """Yield problems that would keep a trainer on this machine from reading the adapters that the job names."""
    reference = job.spec.training.kl.reference.path
    for at, agent in enumerate(job.spec.agents):
        if agent.init_from is not None:
            loc: Loc = ("spec", "agents", at, "initFrom", "path")
            yield from (Problem(loc, text) for text in _complaints(agent, Path(agent.init_from.path)))
        if reference is not None and agent.trainable:
            loc = ("spec", "training", "kl", "reference", "path")
            yield from (Problem(loc, text) for text in _complaints(agent, Path(reference)))


def export_problems(jobs: Sequence[Placed[RLJob]]) -> Iterator[Finding]:
    """Yield findings for exports that a local run could not write, or that two jobs would both write."""
    first: dict[Path, Placed[RLJob]] = {}
    for job in jobs:
        path = job.object.spec.export.path
        target = Path(path).expanduser().absolute() if path is not None else None
        if target is None:
            continue
        there = first.setdefault(target, job)
        why = objection(target) if there is job else f"is the export of the job at {there.place} as well; name another"
        if why is not None:
            yield job.source.finding(Problem(("spec", "export", "path"), f"{target} {why}"))


def _complaints(agent: AgentSpec, given: Path) -> Iterator[str]:
    folder = given.absolute()
    lacking = [name for name in (CONFIG, TENSORS) if not (folder / name).is_file()]
    if given.parts[:1] == ("~",):
        yield f"'{given}' begins with ~, which stands for no folder here; give the whole path"
    elif lacking:
        why = f"it has no {lacking[0]}" if folder.is_dir() else "there is no such folder"
        yield f"no PEFT adapter in {folder}: {why}"
    else:
        yield from _misfits(agent, folder)


def _misfits(agent: AgentSpec, folder: Path) -> Iterator[str]:
    """Yield differences in rank and alpha: a trainer loads an adapter without changing them."""
    config = _config(folder / CONFIG)
    for key, field, wanted in (("r", "rank", agent.adapter.rank), ("lora_alpha", "alpha", agent.adapter.alpha)):
        if config.get(key) != wanted:
            there = config.get(key, "nothing")
            yield f"the adapter in {folder} has {field} {there}, and adapter.{field} of the agent is {wanted}; make them the same"


def _config(file: Path) -> dict[str, Any]:
    try:
        read = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return read if isinstance(read, dict) else {}
