"""Documents of small jobs for the trainer's tests."""

from collections.abc import Mapping
from typing import Any

from marlaas_api.documents import job_spec
from marlaas_api.kinds import RLJobSpec
from marlaas_api.messages import JobDocument
from marlaas_worker.trainer.assignment import Assignment


def job(name: str = "sums", *, agent: Mapping[str, Any] | None = None, **training: Any) -> JobDocument:
    """A small strict job on the pool `tiny`."""
    spec = {
        "poolRef": {"name": "tiny"},
        "agents": [{"name": "policy", "adapter": {"rank": 8, "alpha": 16}, **(agent or {})}],
        "environment": {"name": "reverse"},
        "rollout": {"groupSize": 3, "temperature": 0.8},
        "training": {
            "steps": 4,
            "groupsPerStep": 2,
            "maxStaleness": 0,
            "microbatchTokens": 64,
            "optimizer": {"learningRate": 3e-3},
            **training,
        },
        "checkpoint": {"keep": 1},
    }
    return JobDocument(
        namespace="team-a",
        job=name,
        uid=f"uid-{name}",
        pool="tiny",
        tenant="team-a",
        seed=3,
        spec=job_spec(RLJobSpec.model_validate(spec)),
    )


def assignment_of(document: JobDocument) -> Assignment:
    return Assignment(document, document.spec.agents[0])
