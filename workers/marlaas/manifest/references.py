"""Check what jobs refer to outside of their manifests: adapters, export folders and environments.

An adapter must exist, be plain LoRA, and have the agent's rank and alpha; its weights are not read. An existing adapter may be
replaced by an export, other files may not. Environments are imported in a child process (`marlaas.environment_check`).
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from marlaas.adapter_folder import CONFIG, TENSORS, objection
from marlaas.environment_check import Checked
from marlaas.envs import BUILTINS, DATASET, own_modules, suite_args
from marlaas.envs.loading import refuse_shadows
from marlaas.manifest.findings import Finding, Placed
from marlaas_api.errors import InvalidInput
from marlaas_api.kinds import ModelPool, RLJob
from marlaas_api.kinds.agent import AdapterSpec, AgentSpec, InitFrom
from marlaas_api.kinds.problems import Loc, Problem
from marlaas_api.kinds.training import EvaluationSpec, SuiteSpec
from marlaas_worker.peft_config import other_base, unsupported_fields

TIMEOUT_S = 120.0


def anchored(path: str, folder: Path) -> str:
    """Return a manifest's path from its folder, as an absolute one; one that begins with ~ as it is."""
    return path if path.startswith("~") else os.path.normpath(folder.absolute() / path)


def anchored_pool(pool: ModelPool, folder: Path) -> ModelPool:
    """Return the pool with its model's path read from the manifest's folder."""
    model = pool.spec.model
    if model.path is None:
        return pool
    model = model.model_copy(update={"path": anchored(model.path, folder)})
    return pool.model_copy(update={"spec": pool.spec.model_copy(update={"model": model})})


def anchored_job(job: RLJob, folder: Path) -> RLJob:
    """Return the job with absolute paths of the adapters and data files that it reads, and of the folder of `export.volume`, from the manifest's folder."""
    agents = tuple(
        agent
        if agent.init_from is None
        else agent.model_copy(update={"init_from": _anchored_init(agent.init_from, folder)})
        for agent in job.spec.agents
    )
    training = job.spec.training
    reference = training.kl.reference
    if reference.path is not None:
        reference = reference.model_copy(update={"path": anchored(reference.path, folder)})
        kl = training.kl.model_copy(update={"reference": reference})
        training = training.model_copy(update={"kl": kl})
    environment = job.spec.environment
    if environment.name == DATASET:
        environment = environment.model_copy(update={"args": _anchored_data(environment.args, folder)})
    suites = tuple(_anchored_suite(suite, folder) for suite in job.spec.evaluation.suites)
    evaluation = job.spec.evaluation.model_copy(update={"suites": suites})
    export = job.spec.export
    if (volume := export.volume) is not None:
        path = anchored(f"{volume.claim_name}/{volume.path}", folder)
        export = export.model_copy(update={"volume": volume.model_copy(update={"path": path})})
    changed = {
        "agents": agents,
        "training": training,
        "environment": environment,
        "evaluation": evaluation,
        "export": export,
    }
    return job.model_copy(update={"spec": job.spec.model_copy(update=changed)})


def _anchored_suite(suite: SuiteSpec, folder: Path) -> SuiteSpec:
    own = suite.environment
    if own is None or own.name != DATASET:
        return suite
    own = own.model_copy(update={"args": _anchored_data(own.args, folder)})
    return suite.model_copy(update={"environment": own})


def _anchored_init(given: InitFrom, folder: Path) -> InitFrom:
    update: dict[str, Any] = {}
    if given.path is not None:
        update["path"] = anchored(given.path, folder)
    if given.sft is not None:
        update["sft"] = given.sft.model_copy(update={"data": _anchored_data(given.sft.data, folder)})
    return given.model_copy(update=update)


def _anchored_data(args: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Return the arguments of a data set with absolute paths. Values of another form are left as they are, to be refused later."""
    found = dict(args)
    for key in ("source", "held_out"):
        part = args.get(key)
        files = part.get("files") if isinstance(part, dict) else None
        if isinstance(files, str):
            found[key] = {**args[key], "files": anchored(files, folder)}
        elif isinstance(files, list):
            paths = [anchored(one, folder) if isinstance(one, str) else one for one in files]
            found[key] = {**args[key], "files": paths}
    return found


def adapter_problems(job: RLJob) -> Iterator[Problem]:
    """Yield problems that would keep a trainer on this machine from reading the adapters that the job names."""
    for loc, agent, path in _given(job):
        yield from (Problem(loc, text) for text in _adapter_problems(agent, Path(path)))


def base_model_notes(job: RLJob, pool: ModelPool, base: str, revision: str | None) -> Iterator[Problem]:
    """Yield the adapters of agents on the pool that name another base model.

    base, revision: of the pool's model: the hub's, or the folder's name and None.
    """
    on_pool = {agent.name for _, agent in job.spec.agents_on(pool.metadata.name)}
    for loc, agent, path in _given(job):
        config = _adapter_config(Path(path) / CONFIG)
        named, at = config.get("base_model_name_or_path"), config.get("revision")
        text = other_base(str(named or ""), str(at) if at else None, base, revision)
        if text is not None and agent.name in on_pool:
            yield Problem(loc, text)


def _given(job: RLJob) -> Iterator[tuple[Loc, AgentSpec, str]]:
    """Yield the field, the agent and the folder of every adapter that a job begins with or refers to."""
    reference = job.spec.training.kl.reference.path
    for at, agent in enumerate(job.spec.agents):
        if agent.init_from is not None and agent.init_from.path is not None:
            yield ("spec", "agents", at, "initFrom", "path"), agent, agent.init_from.path
        if reference is not None and agent.trainable and agent.policy is None:
            yield ("spec", "training", "kl", "reference", "path"), agent, reference


def export_problems(jobs: Sequence[Placed[RLJob]], runnable: bool) -> Iterator[Finding]:
    """Yield findings for exports that two jobs would both write and, if `runnable`, that a local run could not write."""
    first: dict[str | Path, Placed[RLJob]] = {}
    for job in jobs:
        for loc, target in _exports(job.object) if runnable else _remote_exports(job):
            there = first.setdefault(target, job)
            if there is not job:
                why: str | None = f"is also written by the job at {there.place}; choose another"
            else:
                why = objection(target) if isinstance(target, Path) else None
            if why is not None:
                yield job.source.finding(Problem(("spec", "export", *loc), f"{target} {why}"))


def _exports(job: RLJob) -> Iterator[tuple[Loc, str | Path]]:
    """Yield the fields of `export` with where the job's adapters go: a repository, a URL or a folder."""
    spec, export = job.spec, job.spec.export
    yield from ((("hub", "repo"), one) for one in spec.hub_repositories)
    yield from ((("s3", "url"), one) for one in (spec.export_folders(export.s3.url) if export.s3 else ()))
    yield from (
        (("volume", "path"), Path(one)) for one in (spec.export_folders(export.volume.path) if export.volume else ())
    )
    if export.path is not None:
        yield ("path",), Path(export.path).expanduser().absolute()


def _remote_exports(job: Placed[RLJob]) -> Iterator[tuple[Loc, str]]:
    """Yield what a cluster exports, as `_exports`: for a folder of a claim, namespace, claim and path."""
    for loc, target in _exports(job.object):
        if isinstance(target, str):
            yield loc, target
        elif loc != ("path",):
            yield loc, f"{job.object.metadata.namespace}/{os.path.relpath(target, job.source.folder)}"


def adapter_shape(given: Path) -> tuple[int, int]:
    """Return rank and alpha of an adapter's folder. Raises InvalidInput if it holds no adapter of plain LoRA."""
    config = _adapter_config(given / CONFIG)
    rank, alpha = config.get("r"), config.get("lora_alpha")
    shape = (
        AgentSpec(name="policy", adapter=AdapterSpec(rank=rank, alpha=alpha))
        if rank and alpha
        else AgentSpec(name="policy")
    )
    if problem := next(_adapter_problems(shape, given), None):
        raise InvalidInput(problem)
    return shape.adapter.rank, shape.adapter.alpha


def _adapter_problems(agent: AgentSpec, given: Path) -> Iterator[str]:
    folder = given.absolute()
    lacking = [name for name in (CONFIG, TENSORS) if not (folder / name).is_file()]
    if given.parts[:1] == ("~",):
        yield f"'{given}' begins with ~, which is not expanded; give the full path"
    elif lacking:
        why = f"it has no {lacking[0]}" if folder.is_dir() else "the folder does not exist"
        yield f"no PEFT adapter in {folder}: {why}"
    else:
        yield from _misfits(agent, folder)


def _misfits(agent: AgentSpec, folder: Path) -> Iterator[str]:
    """Yield settings that are not plain LoRA, and differences in rank and alpha: a trainer loads an adapter as it is."""
    config = _adapter_config(folder / CONFIG)
    yield from (f"the adapter in {folder} is not plain LoRA: {field}" for field in unsupported_fields(config))
    for key, field, wanted in (("r", "rank", agent.adapter.rank), ("lora_alpha", "alpha", agent.adapter.alpha)):
        if config.get(key) != wanted:
            there = config.get(key, "nothing")
            yield f"the adapter in {folder} has {field} {there}, and adapter.{field} of the agent is {wanted}; they must be equal"


def _adapter_config(file: Path) -> dict[str, Any]:
    try:
        read = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return read if isinstance(read, dict) else {}


@dataclass(frozen=True, slots=True)
class _Question:
    """An environment that a job names, or the data set of its supervised fine-tuning.

    agents: that it is for. loc: of the arguments, in the job.
    """

    job: Placed[RLJob]
    name: str
    args: dict[str, Any]
    agents: tuple[str, ...]
    demonstrates: bool
    loc: Loc

    def at(self, loc: Sequence[str | int] = ()) -> Loc:
        """Return the most specific field that can be blamed. loc: below the arguments, if it is known."""
        if self.name in BUILTINS:
            return (*self.loc, *loc)
        environment = self.loc[:-1]
        return environment if ":" in self.name else (*environment, "name")


def check_environments(
    jobs: Iterable[Placed[RLJob]], timeout_s: float = TIMEOUT_S
) -> tuple[list[Finding], list[Finding]]:
    """Return errors of the jobs' environments, and notes on them. A user's module is searched beside the manifest, then on PYTHONPATH."""
    jobs = list(jobs)
    named = [question for job in jobs for question in _questions(job)]
    errors: list[Finding] = []
    notes: list[Finding] = []
    for folder, together in groupby(sorted(named, key=_folder), key=_folder):
        batch = list(together)
        try:
            refuse_shadows(folder)
        except InvalidInput as error:
            own = [one for one in batch if own_modules(one.name, one.args)]
            errors += [one.job.source.finding(Problem(one.loc[:-1], str(error))) for one in own]
            batch = [one for one in batch if one not in own]
        for one, found in zip(batch, _checked(folder, batch, timeout_s), strict=False):
            errors += one.job.source.findings(Problem(one.at(found.loc), text) for text in found.problems)
            notes += one.job.source.findings(Problem(one.at(), text) for text in found.notes)
    for job in jobs:
        errors += job.source.findings(_unusable_data(job.object))
    return errors, notes


def _questions(job: Placed[RLJob]) -> Iterator[_Question]:
    """Yield what is to be checked of a job."""
    spec = job.object.spec
    agents = spec.called_agents
    if spec.environment.name is not None:
        demonstrates = spec.training.algorithm == "sft"
        loc: Loc = ("spec", "environment", "args")
        yield _Question(job, spec.environment.name, spec.environment.args, agents, demonstrates, loc)
    for at, suite in enumerate(spec.evaluation.suites):
        own = suite.environment
        is_here = spec.environment.image is None or (own is not None and not own_modules(own.name, own.args))
        if own is not None and is_here:  # else in the job's image
            loc = ("spec", "evaluation", "suites", at, "environment", "args")
            yield _Question(job, own.name, suite_args(own.name, own.args), agents, False, loc)
    for at, agent in enumerate(spec.agents):
        if agent.init_from is not None and agent.init_from.sft is not None:
            data, loc = agent.init_from.sft.data, ("spec", "agents", at, "initFrom", "sft", "data")
            yield _Question(job, DATASET, data, (agent.name,), True, loc)


def _unusable_data(job: RLJob) -> Iterator[Problem]:
    """Yield what cannot be done with a data set without rewards, or without training rows."""
    spec = job.spec
    for at, suite in enumerate(spec.evaluation.suites):
        if (own := suite.environment) is not None and own.name == DATASET and not own.args.get("rewards"):
            loc = ("spec", "evaluation", "suites", at, "environment", "args")
            yield Problem(loc, "rewards: an evaluation scores replies; give rewards")
    if spec.environment.name != DATASET:
        return
    args, loc_of_args = spec.environment.args, ("spec", "environment", "args")
    held_out = args.get("held_out")
    if isinstance(held_out, dict) and held_out.get("share") == 1 and spec.training.steps:
        yield Problem((*loc_of_args, "held_out"), "share 1 holds out every row, so none can be trained; lower it")
    if args.get("rewards"):
        return
    if spec.training.algorithm != "sft":
        yield Problem(loc_of_args, "rewards: only the algorithm sft trains without rewards; give rewards")
    elif _evaluates_own_environment(spec.evaluation):
        text = "the data set has no rewards, so an evaluation could not score replies; give rewards, or set tasks: 0"
        yield Problem(("spec", "evaluation"), text)


def _evaluates_own_environment(evaluation: EvaluationSpec) -> bool:
    """Return whether the job's environment plays evaluations."""
    if evaluation.suites:
        return any(suite.environment is None for suite in evaluation.suites)
    return evaluation.tasks > 0


def _folder(question: _Question) -> Path:
    return question.job.source.folder


def _checked(folder: Path, questions: Sequence[_Question], timeout_s: float) -> list[Checked]:
    """Return one result per question, in order. If a module ends the child, the list is shorter and its last entry reports that."""
    given = [[one.name, one.args, one.agents, one.demonstrates] for one in questions]
    answers, end = _ask(folder, json.dumps(given), timeout_s)
    found = [Checked(*json.loads(answer)) for answer in answers]
    if len(found) < len(questions):
        name = questions[len(found)].name
        if name == DATASET:
            text = (
                f"checking its rows {end}; `marlaas data show` checks them without a time limit, and keeps the result"
            )
        else:
            text = f"importing its module {end}"
        found.append(Checked([f"environment '{name}': {text}"]))
    return found


def _ask(folder: Path, given: str, timeout_s: float) -> tuple[list[str], str]:
    """Return the child's answers, and how it ended."""
    path = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
    child = subprocess.Popen(
        [sys.executable, "-P", "-m", "marlaas.environment_check"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": path},
        text=True,
    )
    try:
        answers, complaints = child.communicate(given, timeout=timeout_s)
        end = f"ended the process (exit code {child.returncode}){_last_line(complaints)}"
    except subprocess.TimeoutExpired:
        child.kill()
        answers, _ = child.communicate()
        end = f"took longer than {timeout_s:g} s"
    return answers.splitlines(), end


def _last_line(text: str) -> str:
    lines = text.strip().splitlines()
    return f": {lines[-1]}" if lines else ""
