"""Check that the teacher of a distillation reads token ids as its students do, for pools whose models are on this machine.

The engine checks the same again, before it scores (`marlaas_worker.rollout.scoring`).
"""

from collections.abc import Iterator, Mapping
from pathlib import Path

from marlaas.models.errors import NotAModel
from marlaas.models.weight_files import read_json
from marlaas_api.kinds import RLJob
from marlaas_api.kinds.checks import pool_text
from marlaas_api.kinds.problems import Problem


def vocabulary_problems(job: RLJob, folders: Mapping[str, Path]) -> Iterator[Problem]:
    """Yield a teacher whose model has another vocabulary than that of an agent that it scores.

    Args:
        folders: of the models by pool, as far as they are on this machine.
    """
    distillation, pools = job.spec.training.distillation, {one.name: job.spec.pool_of(one) for one in job.spec.agents}
    theirs = pools.get(distillation.teacher) if distillation is not None else None
    for pool in dict.fromkeys(pools[agent.name] for agent in job.spec.agents if agent.trainable):
        if theirs is None or theirs not in folders or pool not in folders:
            continue
        wanted, found = vocabulary(folders[pool]), vocabulary(folders[theirs])
        if wanted is None or found is None or wanted == found:
            continue
        differing = sorted(wanted.items() ^ found.items(), key=lambda one: one[1])
        yield Problem(
            ("spec", "training", "distillation", "teacher"),
            f"the models of {pool_text(job, theirs)} and {pool_text(job, pool)} have different vocabularies, of {len(found)} and {len(wanted)} tokens "
            f"(token {differing[0][1]} is the first that differs): the teacher would read other texts than the student has written. Choose a teacher whose "
            "model has the student's tokenizer",
        )


def vocabulary(folder: Path) -> dict[str, int] | None:
    """Return the ids of the tokens of a model's `tokenizer.json`; None if it has none that can be read."""
    try:
        contents = read_json(folder / "tokenizer.json")
    except NotAModel:
        return None  # Some tokenizers have no such file; one that is damaged is told where templates are checked.
    known = contents.get("model", {}).get("vocab", {})
    tokens = known.items() if isinstance(known, dict) else ((entry[0], at) for at, entry in enumerate(known))
    return dict(tokens) | {one["content"]: one["id"] for one in contents.get("added_tokens", ())}
