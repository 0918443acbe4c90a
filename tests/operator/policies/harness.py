"""A cluster and a bus around the policies, small enough to be run a thousand times: it applies, deletes and stores as the real ones do, makes a pod for
a Deployment, admits and forgets jobs as the orchestrator does, and can lose the operator between any two of its actions."""

import copy
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from tests.operator.policies.scenes import AWAKE, INSTALLATION, META, NOW, modelpool, pod, progress, queued, rljob

from marlaas_api.kinds import RLJob
from marlaas_api.messages import JobDocument, Phase, Progress
from marlaas_operator.manifests.pods import sandbox_name
from marlaas_operator.plan import (
    Action,
    AddFinalizer,
    Apply,
    Delete,
    DeleteObject,
    Plan,
    RemoveFinalizer,
    WriteDocument,
)
from marlaas_operator.policies.job import plan_job
from marlaas_operator.snapshot import JobPool, JobSnapshot, Meta

MOST_ROUNDS = 30


class PolicyHarness:
    """One job and what belongs to it. The clock advances by a second a round."""

    def __init__(self, job: RLJob | None = None) -> None:
        self.now = NOW
        self.job = job or rljob()
        self.meta: Meta | None = replace(META, finalizers=(), created_at=NOW)
        self.status: dict[str, Any] | None = None
        self.objects: dict[tuple[str, str], dict[str, Any]] = {}
        self.document: JobDocument | None = None
        self.progress: Progress | None = None
        self.events: list[str] = []
        self.unguarded: list[str] = []
        self._made = 0

    def snapshot(self) -> JobSnapshot:
        assert self.meta is not None
        admitted = self.progress is not None and self.progress.admitted
        return JobSnapshot(
            meta=self.meta,
            bus=AWAKE,
            job=self.job,
            status=self.status,
            pools=(JobPool("tiny", modelpool(), pods=(pod("rollout"), pod("trainer"))),),
            document=self.document,
            progress=self.progress,
            owned={key: body for key, body in self.objects.items() if key[0] != "Secret"},
            pods=(pod("sandbox"),) if self._runs() else (),
            credential="creds" if admitted else None,
            first_seen_at=NOW,
            deletion_seen_at=self.meta.deleted_at or 0.0,
        )

    def settle(self, crash_after: Callable[[], int | None] = lambda: None) -> None:
        """Plan and perform until nothing is to be done; crash_after says after how many actions of a plan the operator dies (None: it lives)."""
        for _ in range(MOST_ROUNDS):
            self.now += 1
            if self.meta is None:
                return
            before = self._state()
            found = plan_job(self.snapshot(), INSTALLATION, self.now)
            crash = crash_after()
            self.perform(found, crash)
            self._orchestrate()
            if found.empty and crash is None and self._state() == before:
                return
        raise AssertionError(f"it never comes to rest: {found}")

    def perform(self, found: Plan, crash: int | None) -> None:
        for action in found.actions[:crash]:
            self._perform(action)
        if crash is not None or self.meta is None or found.status is None:
            return
        merged = {**(self.status or {}), **found.status}
        self.status = copy.deepcopy({key: value for key, value in merged.items() if value is not None})
        self.events += [event.reason for event in found.events]

    def _state(self) -> Any:
        return copy.deepcopy((self.meta, self.status, self.objects, self.document, self.progress))

    def _perform(self, action: Action) -> None:
        assert self.meta is not None
        match action:
            case Apply(manifest):
                self._apply(manifest)
            case Delete(kind, _, name, uid):
                found = self.objects.get((kind, name))
                if found is not None and uid in (None, found["metadata"]["uid"]):
                    del self.objects[kind, name]
            case AddFinalizer(finalizer):
                self.meta = replace(self.meta, finalizers=(finalizer,))
            case RemoveFinalizer():
                self.meta = None
                self.objects.clear()  # the garbage collector
            case DeleteObject():
                self.delete()
            case WriteDocument(document, replaces):
                assert self.document == replaces, "somebody wrote in between"
                self.document = document
        if self._runs() and not {"NetworkPolicy", "ServiceAccount", "Secret"} <= {kind for kind, _ in self.objects}:
            self.unguarded.append(str(action))

    def delete(self) -> None:
        if self.meta is not None and self.meta.deleted_at is None:
            self.meta = replace(self.meta, deleted_at=self.now)

    def _apply(self, manifest: Mapping[str, Any]) -> None:
        self._made += 1
        key = manifest["kind"], manifest["metadata"]["name"]
        uid = self.objects[key]["metadata"]["uid"] if key in self.objects else f"o{self._made}"
        self.objects[key] = {**copy.deepcopy(dict(manifest)), "metadata": {**manifest["metadata"], "uid": uid}}

    def _runs(self) -> bool:
        return ("Deployment", sandbox_name("sums")) in self.objects

    def _orchestrate(self) -> None:
        if self.document is not None and self.document.deleted:
            self.document = self.progress = None
        elif self.document is not None and self.progress is None:
            self.progress = queued()
        elif self.document is not None and self.document.verdict is not None:
            self.progress = progress(Phase.FAILED, self.document.verdict.reason, finished_at=NOW + 100)

    def admit(self) -> None:
        self.progress = progress()

    def end(self) -> None:
        self.progress = progress(Phase.SUCCEEDED, "Finished", step=40, finished_at=NOW + 100)

    def result(self) -> Any:
        """What is so in the end, but for names that are given by chance and times of the clock."""
        if self.meta is None:
            return self.objects, self.document, self.progress
        objects = {key: {k: v for k, v in body.items() if k != "metadata"} for key, body in self.objects.items()}
        status = copy.deepcopy(self.status)
        for condition in (status or {}).get("conditions", ()):
            condition.pop("lastTransitionTime")
        return self.meta.finalizers, status, objects, self.document, self.progress
