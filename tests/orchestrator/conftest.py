"""A job document and the episodes of its groups, for tests of pure decisions."""

from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
from tests.orchestrator.harness import OrchestratorHarness

from marlaas_api import failpoints
from marlaas_api.documents import job_spec
from marlaas_api.kinds import RLJobSpec
from marlaas_api.messages import Episode, FaultClass, JobDocument
from marlaas_api.names import Split, episode_id, train_group


@pytest.fixture
def document() -> Callable[..., JobDocument]:
    def make(
        name: str = "sums",
        *,
        rank: int = 8,
        suspend: bool = False,
        priority: int = 0,
        created_at: float = 0.0,
        **training: object,
    ) -> JobDocument:
        settings = {"steps": 3, "groupsPerStep": 2, "maxStaleness": 0, "maxRefill": 1} | training
        spec = job_spec(
            RLJobSpec.model_validate(
                {
                    "poolRef": {"name": "tiny"},
                    "agents": [{"name": "policy", "adapter": {"rank": rank}}],
                    "environment": {"name": "reverse"},
                    "rollout": {"groupSize": 2},
                    "training": settings,
                    "evaluation": {"tasks": 2, "every": 2},
                    "suspend": suspend,
                    "priority": priority,
                }
            )
        )
        identity = {"namespace": "team-a", "job": name, "uid": f"uid-{name}", "created_at": created_at}
        return JobDocument(**identity, pool="tiny", tenant="team-a", spec=spec)

    return make


@pytest.fixture
def play() -> Callable[..., list[Episode]]:
    """Both episodes of the training group with this index; a reward of None is an environment fault."""

    def make(document: JobDocument, index: int, rewards: tuple[float | None, ...]) -> list[Episode]:
        group = train_group(document.ref, index)
        return [
            Episode(
                namespace=document.namespace,
                job=document.job,
                uid=document.uid,
                group=group,
                split=Split.TRAIN,
                index=index,
                member=member,
                episode=episode_id(group, member, 1),
                fault=FaultClass.ENV if reward is None else None,
                fault_text="KeyError: 'x'" if reward is None else "",
                rewards={} if reward is None else {"policy": reward},
                leaves={"policy": (0,)},
            )
            for member, reward in enumerate(rewards)
        ]

    return make


@pytest.fixture
async def harness(tmp_path: Path) -> AsyncIterator[OrchestratorHarness]:
    made = OrchestratorHarness(tmp_path)
    await made.bus.ensure()
    yield made
    failpoints.hook = None
