"""Documents of small jobs for the trainer's tests."""

from collections.abc import Mapping
from typing import Any

from tests.harness import job_document

from marlaas_api.messages import JobDocument
from marlaas_worker.trainer.assignment import Assignment


def job(name: str = "sums", *, agent: Mapping[str, Any] | None = None, **training: Any) -> JobDocument:
    """A small strict job on the pool `tiny`."""
    small = {"steps": 4, "groupsPerStep": 2, "maxStaleness": 0, "microbatchTokens": 64}
    spec = {
        "agents": [{"name": "policy", "adapter": {"rank": 8, "alpha": 16}, **(agent or {})}],
        "rollout": {"groupSize": 3, "temperature": 0.8},
        "training": {**small, "optimizer": {"learningRate": 3e-3}, **training},
        "checkpoint": {"keep": 1},
    }
    return job_document(name, seed=3, spec=spec)


def assignment_of(document: JobDocument) -> Assignment:
    return Assignment(document, document.spec.agents[0])
