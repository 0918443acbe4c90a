"""The jobs of manifests whose environment is a data set, with what `marlaas data show` needs of their pools' models."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from marlaas.envs import DATASET
from marlaas.manifest.loading import LoadedManifest, load
from marlaas.manifest.models import model_folder
from marlaas.manifest.references import anchored_job, anchored_pool
from marlaas.manifest.templates import chosen_template
from marlaas.models.chosen_template import light_renderer
from marlaas.models.errors import ModelError
from marlaas_api.errors import InvalidInput
from marlaas_api.kinds import ModelPool, RLJob

_TOKENIZER = "tokenizer.json"

CountTokens = Callable[[Sequence[Mapping[str, str]]], int]
"""Returns the tokens of a prompt of {role, content}, with the chat template and the beginning of the reply."""


@dataclass(frozen=True, slots=True)
class DataJob:
    """A job on a data set.

    job: its files are read from the manifest's folder. pool: of its agent; None: not in the files. count: None if the tokenizer of the
    pool's model is not on this machine.
    """

    job: RLJob
    folder: Path
    pool: ModelPool | None
    count: CountTokens | None

    @property
    def name(self) -> str:
        """Namespace and name."""
        return f"{self.job.metadata.namespace}/{self.job.metadata.name}"

    @property
    def args(self) -> dict[str, Any]:
        """The arguments of the data set."""
        return self.job.spec.environment.args


def data_jobs(paths: Sequence[str]) -> list[DataJob]:
    """Return the jobs on data sets. Raises InvalidManifest; InvalidInput: there is none."""
    manifest = load(paths, runnable=False, environments=False)
    found = [
        _data_job(manifest, job, folder)
        for job, folder in zip(manifest.jobs, manifest.folders, strict=True)
        if job.spec.environment.name == DATASET
    ]
    if not found:
        raise InvalidInput(f"no RLJob in {', '.join(paths)} has the environment '{DATASET}'")
    return found


def _data_job(manifest: LoadedManifest, job: RLJob, folder: Path) -> DataJob:
    names = {agent.pool_ref.name for agent in job.spec.agents if agent.pool_ref is not None}
    named = {*names, *([job.spec.pool_ref.name] if job.spec.pool_ref is not None else [])}
    pool = next((anchored_pool(one, folder) for one in manifest.pools if one.metadata.name in named), None)
    job = anchored_job(job, folder)
    return DataJob(job, folder, pool, None if pool is None else _counter(job, pool))


def _counter(job: RLJob, pool: ModelPool) -> CountTokens | None:
    """Return the function that counts the tokens of a prompt; None if the model is not on this machine or has no such files."""
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
    return lambda messages: len(tokenizer.encode(render(messages), add_special_tokens=False).ids)
