"""Golden cases: `golden/<name>.in.yaml` holds the objects, `golden/<name>.out.yaml` the manifests that follow from them.

`MARLAAS_UPDATE_GOLDEN=1 pytest tests/operator/manifests` writes the latter anew; read the difference before it is committed.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from tests.operator.objects import installation as make_installation

from marlaas_api.documents import job_document
from marlaas_api.kinds import ModelPool, RLJob, SandboxBounds
from marlaas_api.kinds.problems import parse
from marlaas_operator.installation import Installation
from marlaas_operator.manifests.exporter import Exporter, exporter_objects, exporter_secret
from marlaas_operator.manifests.pool import Pool, role_objects, role_secret, shared_objects
from marlaas_operator.manifests.sandbox import Sandbox, sandbox_objects, sandbox_secret
from marlaas_operator.plan import Manifest
from marlaas_operator.snapshot import Meta

GOLDEN = Path(__file__).with_name("golden")
CASES = sorted(path.name.removesuffix(".in.yaml") for path in GOLDEN.glob("*.in.yaml"))


def manifests(case: str) -> list[Manifest]:
    """What the operator makes of a case's objects, as JSON has it."""
    objects = {body["kind"]: body for body in yaml.safe_load_all((GOLDEN / f"{case}.in.yaml").read_text())}
    given = {key: value for key, value in objects.pop("Installation", {}).items() if key != "kind"}
    installation = make_installation(**given)
    found = _sandbox(objects, installation) if "RLJob" in objects else _pool(objects, installation)
    return [json.loads(json.dumps(manifest)) for manifest in found]


def pods(case: str) -> list[tuple[str, Manifest]]:
    """(kind of workload, PodSpec) of every workload of a case."""
    made = manifests(case)
    return [(m["kind"], m["spec"]["template"]["spec"]) for m in made if "template" in m.get("spec", {})]


def _sandbox(objects: dict[str, Any], installation: Installation) -> list[Manifest]:
    job = parse(RLJob, objects["RLJob"])
    bounds = parse(ModelPool, objects["ModelPool"]).spec.sandbox if "ModelPool" in objects else SandboxBounds()
    meta = Meta(name=job.metadata.name, uid="u1", namespace=job.metadata.namespace)
    given = meta, job_document(job, (), "u1", None), bounds, "credential"
    sandbox, exporter = Sandbox(*given), Exporter(*given, has_succeeded=True)
    if job.spec.export.trackers:
        return [*exporter_objects(exporter, installation), exporter_secret(exporter, installation)]
    return [*sandbox_objects(sandbox, installation), sandbox_secret(sandbox, installation)]


def _pool(objects: dict[str, Any], installation: Installation) -> list[Manifest]:
    pool = parse(ModelPool, objects["ModelPool"])
    made = Pool(Meta(name=pool.metadata.name, uid="p1"), pool, {"rollout": "credential r", "trainer": "credential t"})
    roles = ("rollout", "trainer")
    manifests = [manifest for role in roles for manifest in role_objects(made, installation, role)]
    return [*shared_objects(made, installation), *manifests, *(role_secret(made, installation, role) for role in roles)]


def beyond(pod: Mapping[str, Any]) -> list[str]:
    """What the pod breaks of our own rules: a read-only root, the last words kept."""
    found = []
    for container in _containers(pod):
        if not container["securityContext"].get("readOnlyRootFilesystem"):
            found.append(f"{container['name']}: its root can be written")
        if container.get("terminationMessagePolicy") != "FallbackToLogsOnError":
            found.append(f"{container['name']}: its last words are lost")
    return found


def holds_token(pod: Mapping[str, Any]) -> bool:
    return pod.get("automountServiceAccountToken") is not False


def _containers(pod: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [*pod.get("initContainers", ()), *pod["containers"]]
