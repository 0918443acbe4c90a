"""`why` tells the truth in one paragraph: why.yaml beside this file has the scenes and what is said of each."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.tables import rows

from marlaas.cluster.errors import AccessDenied
from marlaas.cluster.explain import ClusterContext, explain
from marlaas.cluster.views import ClusterJobView, event_view, job_view, jobs_beside, pool_view
from marlaas_api.reason_texts import NOTHING, TEXTS, ReasonStage
from marlaas_api.reasons import Reason

SCENES: list[dict[str, Any]] = yaml.safe_load(Path(__file__).with_name("why.yaml").read_text())
NOW = 1_800_000_000.0
"""2027-01-15T08:00:00Z; the scenes happen in the minutes before."""

PHASES = {ReasonStage.WAITING: "Queued", ReasonStage.ENDED: "Succeeded", ReasonStage.FAILED: "Failed"}


def _job(status, agents=None, spec=None, **meta):
    fixed = {"name": "reverse", "namespace": "team-a", "uid": "u1", "creationTimestamp": "2027-01-15T07:50:00Z"}
    plain = {"poolRef": {"name": "tiny"}, "backoffLimit": 6, **({"agents": agents} if agents else {})}
    return {"metadata": {**fixed, **meta}, "spec": {**plain, **(spec or {})}, "status": status}


def _pool(status: dict[str, Any], name: str = "tiny") -> dict[str, Any]:
    spec = {"adapterSlots": 8, "rollout": {"replicas": 1}, "trainer": {"replicas": 1}}
    return {"metadata": {"name": name}, "spec": spec, "status": status}


def _said(scene: dict[str, Any]) -> str:
    job = job_view(_job(scene.get("status"), scene.get("agents"), scene.get("spec"), **scene.get("metadata", {})))
    pools = [pool_view(_pool(scene["pool"]))] if "pool" in scene else []
    events = [event_view({"metadata": {}, **body}) for body in scene.get("events", [])]
    jobs = [_other(scene, phase, name) for phase in ("Running", "Queued") for name in scene.get(phase.lower(), {})]
    return explain(job, ClusterContext(pools, events, jobs), NOW)


def _other(scene: dict[str, Any], phase: str, name: str) -> ClusterJobView:
    """A job of the scene's `running` or `queued`: fields of its status, with `agents`, `spec` and `metadata` of its own."""
    status = dict(scene[phase.lower()][name])
    agents, spec, meta = status.pop("agents", None), status.pop("spec", None), status.pop("metadata", {})
    return job_view(_job({"phase": phase, **status}, agents, spec, name=name, **meta))


@pytest.mark.parametrize("scene", SCENES, ids=lambda scene: scene["scene"])
def test_why_says_of_a_scene(scene):
    assert _said(scene) == scene["says"].rstrip("\n")


def test_why_tells_of_every_pool_of_the_agents_and_which_one_is_not_ready():
    agents = [{"name": "solver"}, {"name": "judge", "poolRef": {"name": "big"}}]
    job = job_view(_job({"phase": "Queued", "reason": "WaitingForPool", "message": "no replica"}, agents))
    assert job.pools == ("tiny", "big")
    assert job_view(_job(None, agents[1:])).pools == ("big",)
    broken = {"type": "RolloutReady", "status": "False", "reason": "ModelNotFound", "message": "no model at /m"}
    stuck = {"rollout": {"ready": 0}, "conditions": [broken | {"lastTransitionTime": "2027-01-15T07:55:40Z"}]}
    ready = {"rollout": {"ready": 1}, "trainer": {"ready": 1}}
    said = explain(job, ClusterContext([pool_view(_pool(ready)), pool_view(_pool(stuck, "big"))]), NOW)
    assert "Pool tiny has 1 of 1 engines and 1 of 1 trainers ready. Pool big has 0 of 1 engines" in said
    assert said.count("The pool is not ready because of ModelNotFound") == 1


@pytest.mark.parametrize("reason", Reason)
def test_why_tells_of_every_reason_what_it_means_and_what_to_do(reason):
    text = TEXTS[reason]
    said = _said({"status": {"phase": PHASES.get(text.stage, "Running"), "reason": reason, "message": "so it is"}})
    assert f"{reason}: {text.meaning}" in said
    assert "so it is." in said
    assert (text.advice.replace("NAME", "reverse -n team-a") if text.advice != NOTHING else "nothing to do") in said
    assert "\n" not in said


def test_why_hands_no_words_of_a_tenant_to_the_terminal():
    """Anybody may write events into a namespace of theirs, and the platform team asks why."""
    words = "\x1b]52;c;ZXZpbA==\x07 no room"
    event = {"type": "Warning", "reason": "PodRefused", "message": words, "lastTimestamp": "2027-01-15T07:59:00Z"}
    status = {"phase": "Running", "reason": "Training", "message": "\x1b[2Jall is well"}
    said = _said({"scene": "", "status": status, "events": [event]})
    assert r"\x1b[2Jall is well" in said
    assert r"\x1b]52;c;ZXZpbA==\x07 no room" in said
    assert "\x1b" not in said


class Kubectl:
    """Lists jobs, those of all namespaces only if it may."""

    def __init__(self, may: bool) -> None:
        self.may = may

    def list(self, kind: str, *options: str) -> list[dict[str, Any]]:
        if options and not self.may:
            raise AccessDenied("forbidden")
        elsewhere = {"poolRef": {"name": "big"}}
        return [
            _job({"phase": "Queued"}, name="itself"),
            _job({"phase": "Running"}, name="here", uid="u2"),
            _job({"phase": "Queued", "tenant": "team-a"}, None, elsewhere, name="of-neither", uid="u3"),
            _job({"phase": "Queued"}, None, elsewhere, name="of-the-tenant", uid="u4"),
            *([_job({"phase": "Running", "tenant": "other"}, name="there", uid="u5")] * len(options)),
        ]


@pytest.mark.parametrize(("reason", "may", "names"), rows(__file__, "beside"))
def test_the_jobs_beside_it_are_those_that_the_user_may_read(reason, may, names):
    job = job_view(_job({"phase": "Queued", "reason": reason}))
    assert [one.name for one in jobs_beside(Kubectl(may), job)] == names  # type: ignore[arg-type]
