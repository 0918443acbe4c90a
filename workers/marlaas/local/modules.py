"""The files of each job's environment, for the run's record: its module, found as Python would find it, and its data set's files."""

import hashlib
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from marlaas.envs import DATASET, own_modules, suite_args
from marlaas.envs.dataset.files import digest
from marlaas.envs.dataset.settings import parsed
from marlaas.envs.dataset.sources import files_of, sources_of
from marlaas.local.folder import ModuleFile
from marlaas_api.messages import JobDocument, JobSpec


def module_files(jobs: Iterable[JobDocument], folders: Mapping[str, Path]) -> dict[str, ModuleFile]:
    """Return the modules of those environments that are the user's own: by job key, and by `KEY SUITE` for that of a suite.

    folders: of the manifests, by job key.
    """
    found = {}
    for job in jobs:
        if job.ref.key not in folders:
            continue
        for suite, name, args in environments_of(job.spec):
            modules = own_modules(name, args)
            file = _file(modules[0], folders[job.ref.key]) if modules else None
            if file is not None and file.is_file():
                digest_of_file = hashlib.sha256(file.read_bytes()).hexdigest()
                found[f"{job.ref.key} {suite}".rstrip()] = ModuleFile(file=str(file), sha256=digest_of_file)
    return found


def environments_of(spec: JobSpec) -> Iterator[tuple[str, str, Mapping[str, Any]]]:
    """Yield suite, name and arguments of a job's environments: of its own, with an empty suite, and of those that only suites play."""
    yield "", spec.environment.name or "", spec.environment.args.value
    for suite in spec.evaluation.suites:
        if (own := suite.environment) is not None:
            yield suite.name, own.name, suite_args(own.name, own.args.value)


def data_files(jobs: Iterable[JobDocument]) -> dict[str, tuple[ModuleFile, ...]]:
    """Return, by job key, the files of data sets, which have been checked before. A file that is gone is left out."""
    found = {}
    for job in jobs:
        given: list[Mapping[str, Any]] = [args for _, name, args in environments_of(job.spec) if name == DATASET]
        given += [] if job.spec.sft is None else [job.spec.sft.data.value]
        sources = [one for args in given for one in sources_of(parsed(args))]
        files = [file for source, name in sources for file in files_of(source, name, is_known=True)]
        if files:
            found[job.ref.key] = tuple(ModuleFile(file=file.origin, sha256=digest(file)) for file in files)
    return found


def changed_data(
    before: Mapping[str, tuple[ModuleFile, ...]], now: Mapping[str, tuple[ModuleFile, ...]]
) -> Iterator[str]:
    """Yield a sentence for each job whose data set has other content than when the run was last started."""
    for key in sorted(before.keys() & now.keys()):
        was, new = ([one.sha256 for one in files[key]] for files in (before, now))
        if was != new:
            changed = next((one.file for one in now[key] if one.sha256 not in was), "a file that is gone")
            yield (
                f"job {key.replace('.', '/')}: its data set has changed since the run was last started ({changed}); the remaining steps have "
                "other tasks, and held-out tasks may have been trained"
            )


def changed_modules(before: Mapping[str, ModuleFile], now: Mapping[str, ModuleFile]) -> Iterator[str]:
    """Yield a sentence for each job whose environment has other code than when the run was last started."""
    for key in sorted(before.keys() & now.keys()):
        was, new = before[key], now[key]
        if was.sha256 != new.sha256:
            job, _, suite = key.partition(" ")
            its = f"the environment of suite {suite}" if suite else "its environment"
            yield (
                f"job {job.replace('.', '/')}: {its} has changed since the run was last started: {was.file} had the SHA-256 "
                f"{was.sha256}, {new.file} has {new.sha256}; the remaining steps play the new code"
            )


def _file(module: str, folder: Path) -> Path | None:
    """Return the module's file, searched as in a sandbox; None if it has none."""
    path: list[str] | None = [str(folder), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)), *sys.path]
    name, spec = "", None
    for part in module.split("."):
        name = f"{name}.{part}".lstrip(".")
        spec = PathFinder.find_spec(name, path)
        if spec is None:
            return None
        path = list(spec.submodule_search_locations or ())
    return Path(spec.origin) if spec is not None and spec.origin is not None else None
