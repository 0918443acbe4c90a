"""The base models that pools name: builtin ones by name, and folders of this machine."""

from collections.abc import Iterable, Iterator

from marlaas.manifest.findings import Finding, Placed
from marlaas.models import ModelError, list_models, resolve
from marlaas_api.kinds import ModelPool
from marlaas_api.kinds.nearest import did_you_mean, listed
from marlaas_api.kinds.problems import Problem


def check_models(pools: Iterable[Placed[ModelPool]], runnable: bool) -> Iterator[Finding]:
    """Yield pools whose builtin model there is not; of those to be run here, also whose folder holds no model."""
    names = [model.name for model in list_models()]
    for pool in pools:
        model = pool.object.spec.model
        if model.builtin is not None and model.builtin not in names:
            text = f"there is no builtin model '{model.builtin}'; there are {listed(names)}"
            yield pool.source.finding(
                Problem(("spec", "model", "builtin"), f"{text}{did_you_mean(model.builtin, names)}")
            )
        elif model.path is not None and runnable:
            yield from _folder(pool)


def _folder(pool: Placed[ModelPool]) -> Iterator[Finding]:
    try:
        resolve(pool.object.spec.model)
    except ModelError as error:
        yield pool.source.finding(Problem(("spec", "model", "path"), str(error)))
