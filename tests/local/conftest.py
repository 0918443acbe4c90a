from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.local.runs import Place, placed

from marlaas_api.documents import job_spec
from marlaas_api.kinds import RLJobSpec
from marlaas_api.messages import EvalRecord, EvalSample, JobDocument, Phase, Progress, StepOutcome, StepRecord

Documents = Callable[..., JobDocument]


@pytest.fixture
def document() -> Documents:
    """A job of three steps on pool `tiny`; `spec` overrides parts of its spec, by camelCase name."""

    def build(name: str = "reverse", spec: dict[str, object] | None = None, **fields: object) -> JobDocument:
        content = {"poolRef": {"name": "tiny"}, "environment": {"name": "reverse"}, "training": {"steps": 3}}
        body = {"namespace": "team-a", "job": name, "uid": f"uid-{name}", "pool": "tiny", "tenant": "team-a"}
        return JobDocument.model_validate(
            {**body, "spec": job_spec(RLJobSpec.model_validate({**content, **(spec or {})})), **fields}
        )

    return build


@pytest.fixture
def progress_of() -> Callable[..., Progress]:
    """The progress of a document's job: running and admitted, unless `fields` change that."""

    def build(document: JobDocument, **fields: object) -> Progress:
        body = {
            "namespace": document.namespace,
            "job": document.job,
            "uid": document.uid,
            "generation": document.generation,
            "phase": Phase.RUNNING,
            "admitted": True,
            "reason": "Admitted",
            "steps": document.spec.training.steps,
        }
        return Progress.model_validate({**body, **fields})

    return build


@pytest.fixture
def step() -> Callable[..., StepRecord]:
    def build(document: JobDocument, number: int, **fields: object) -> StepRecord:
        body = {
            "namespace": document.namespace,
            "job": document.job,
            "uid": document.uid,
            "step": number,
            "outcome": StepOutcome.COMMITTED,
            "version": number + 1,
            "at": 100.0 + number,
            "wall_s": 1.0,
            "reward_mean": 0.1 * number,
            "reward_std": 0.2,
            "indices": (number,),
            "num_groups": 8,
            "num_episodes": 64,
        }
        return StepRecord.model_validate({**body, **fields})

    return build


@pytest.fixture
def evaluation() -> Callable[..., EvalRecord]:
    def build(document: JobDocument, version: int, mean: float, replies: tuple[str, ...] = ()) -> EvalRecord:
        samples = tuple(
            EvalSample(index=i, prompt=f"p{i}", reply=reply, reward=mean) for i, reply in enumerate(replies)
        )
        return EvalRecord(
            namespace=document.namespace,
            job=document.job,
            uid=document.uid,
            step=version,
            version=version,
            at=1.0,
            reward_mean=mean,
            num_episodes=64,
            samples=samples,
        )

    return build


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    with placed(tmp_path) as here:
        yield here
