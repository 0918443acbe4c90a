"""Small objects to decide about: a job, its pool, what the bus says, what pods say. Everything has a plain default."""

from dataclasses import replace
from typing import Any

from tests.operator import objects
from tests.operator.objects import installation
from tests.tables import rows

from marlaas_api.documents import job_document
from marlaas_api.kinds import ModelPool, RLJob, Tenant
from marlaas_api.messages import DestinationReport, ExportReport, JobDocument, Phase, Progress
from marlaas_operator.manifests.pods import sandbox_name
from marlaas_operator.manifests.sandbox import Sandbox, sandbox_objects
from marlaas_operator.pod_facts import ContainerFacts, PodFacts
from marlaas_operator.policies.job import FINALIZER
from marlaas_operator.snapshot import BusState, JobLoad, JobPool, JobSnapshot, Meta, PoolSnapshot

NOW = 1_800_000_000.0
AWAKE = BusState(available=True, since=0.0)
INSTALLATION = installation()
META = Meta(name="sums", uid="u1", namespace="team-a", created_at=NOW - 100, finalizers=(FINALIZER,))
SANDBOX = sandbox_name("sums")


def rljob(spec: dict[str, Any] | None = None, **environment: Any) -> RLJob:
    """A job of team-a; what is given replaces parts of its spec and of its environment."""
    where = environment if "image" in environment else {"name": "reverse", **environment}
    plain = {"environment": where, "training": {"steps": 40}}
    return RLJob.model_validate(objects.job("team-a", "sums", "tiny", **{**plain, **(spec or {})}))


def modelpool(**spec: Any) -> ModelPool:
    return ModelPool.model_validate(objects.pool("tiny", **spec))


def tenant(name: str, *namespaces: str, weight: float = 1.0) -> Tenant:
    return Tenant.model_validate(objects.tenant(name, *namespaces, weight=weight))


def document(job: RLJob | None = None, **changes: Any) -> JobDocument:
    return job_document(job or rljob(), (), "u1", None, META.created_at).model_copy(update=changes)


def progress(phase: Phase = Phase.RUNNING, reason: str = "Training", **fields: Any) -> Progress:
    plain = {"namespace": "team-a", "job": "sums", "uid": "u1", "steps": 40, "admitted": phase == Phase.RUNNING}
    return Progress.model_validate({**plain, "phase": Phase(phase), "reason": reason, **fields})


def queued(reason: str = "WaitingForSlots", message: str = "needs 3 of the 8 adapter slots", **fields: Any) -> Progress:
    return progress(Phase.QUEUED, reason, message=message, **fields)


def report(uid: str = "u1", ended: str = "", name: str = "mlflow", **fields: Any) -> ExportReport:
    identity = {"namespace": "team-a", "job": "sums", "uid": uid}
    return ExportReport(**identity, ended=ended, destinations=(DestinationReport(name=name, **fields),))


def repooled(scene: JobSnapshot, **fields: Any) -> JobSnapshot:
    """The scene with another state of the job's own pool."""
    [own, *others] = scene.pools
    return replace(scene, pools=(replace(own, **fields), *others))


def snapshot(**fields: Any) -> JobSnapshot:
    """A job that is handed over and runs, with nothing observed in the cluster yet. on: the state of the pool `tiny`."""
    on = fields.pop("on", {})
    plain: dict[str, Any] = {
        "meta": META,
        "bus": AWAKE,
        "job": rljob(),
        "pools": (JobPool(**{"name": "tiny", "pool": modelpool(), **on}),),
        "document": document(fields.get("job")),
        "progress": progress(),
        "credential": "creds",
        "first_seen_at": NOW - 100,
        "deletion_seen_at": fields.get("meta", META).deleted_at or 0.0,
    }
    return JobSnapshot(**{**plain, **fields})


def new(**fields: Any) -> JobSnapshot:
    return snapshot(**{"document": None, "progress": None, "credential": None, "first_seen_at": NOW, **fields})


def owned_sandbox(job: RLJob | None = None) -> dict[tuple[str, str], dict[str, Any]]:
    found = rljob() if job is None else job
    made = Sandbox(META, document(found), modelpool().spec.sandbox, "creds")
    return {key_of(manifest): stored(manifest) for manifest in sandbox_objects(made, INSTALLATION)}


def key_of(manifest: Any) -> tuple[str, str]:
    return manifest["kind"], manifest["metadata"]["name"]


def stored(manifest: Any, uid: str = "o1") -> dict[str, Any]:
    """An object as the API server would give it back."""
    return {**manifest, "metadata": {"namespace": "", **manifest["metadata"], "uid": uid}}


def running(**fields: Any) -> JobSnapshot:
    """A job in the middle of its training, its pool serving and everything as it should be, but for its status, which was never written."""
    on = {"pods": (pod("rollout"), pod("trainer")), **fields.pop("on", {})}
    return snapshot(**{"owned": owned_sandbox(fields.get("job")), "pods": (pod("sandbox"),), "on": on, **fields})


def pod(component: str = "sandbox", *containers: ContainerFacts, ready: bool = True, **fields: Any) -> PodFacts:
    plain = {"name": f"{component}-0", "component": component, "phase": "Running", "created_at": NOW - 5}
    return PodFacts(**{**plain, "ready": ready, "containers": containers, **fields})


def container(name: str = "supervisor", **fields: Any) -> ContainerFacts:
    return ContainerFacts(**{"name": name, "init": False, "ready": False, "restarts": 0, **fields})


def crashed(words: str = "boom", restarts: int = 1, component: str = "sandbox", **fields: Any) -> PodFacts:
    state = container(restarts=restarts, waiting="CrashLoopBackOff", exit_code=1, last_words=words)
    return pod(component, state, ready=False, **fields)


def load(name: str = "sums", phase: Phase = Phase.RUNNING, **fields: Any) -> JobLoad:
    plain = {"namespace": "team-a", "name": name, "admitted": phase is Phase.RUNNING}
    return JobLoad(**{**plain, "phase": phase, "slots": {"tiny": 3}, "published": True, **fields})


def pool_snapshot(**fields: Any) -> PoolSnapshot:
    meta = Meta(name="tiny", uid="p1", created_at=NOW - 100, finalizers=("marlaas.dev/pool",))
    plain = {"meta": meta, "bus": AWAKE, "pool": modelpool(), "credentials": {"rollout": "r", "trainer": "t"}}
    return PoolSnapshot(**{**plain, **fields})


def deleted(meta: Meta = META, ago_s: float = 1.0) -> Meta:
    return replace(meta, deleted_at=NOW - ago_s)


def ago(seconds: float) -> float:
    return NOW - seconds


def scene_rows(test_file: str, name: str) -> list[Any]:
    """The rows of a table, in which `{=NAME: FIELDS}` is what the function or class of that name of this module makes of the fields."""
    found = rows(test_file, name)
    return [row._replace(values=_made(list(row.values))) if hasattr(row, "id") else _made(row) for row in found]


def _made(value: Any) -> Any:
    if isinstance(value, list):
        return tuple(map(_made, value))
    if not isinstance(value, dict):
        return value
    fields = {key: _made(each) for key, each in value.items()}
    name = next(iter(fields), "")
    if not name.startswith("="):
        return fields
    make, given = globals()[name[1:]], fields[name]
    return make(**given) if isinstance(given, dict) else make(given)
