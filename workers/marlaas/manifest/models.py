"""The base models that pools name: builtin ones are known by name."""

from collections.abc import Iterable, Iterator

from marlaas.manifest.findings import Finding, Placed
from marlaas_api.kinds import ModelPool
from marlaas_api.kinds.nearest import did_you_mean, listed
from marlaas_api.kinds.problems import Problem

BUILTIN_MODELS = ("tiny", "smollm2-135m-instruct")


def builtin_models() -> tuple[str, ...]:
    """Names of the builtin models."""
    return BUILTIN_MODELS


def check_models(pools: Iterable[Placed[ModelPool]]) -> Iterator[Finding]:
    """Yield pools of builtin models that there are not."""
    known = builtin_models()
    for pool in pools:
        name = pool.object.spec.model.builtin
        if name is not None and name not in known:
            text = f"there is no builtin model '{name}'; there are {listed(known)}{did_you_mean(name, known)}"
            yield pool.source.finding(Problem(("spec", "model", "builtin"), text))
