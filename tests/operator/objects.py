"""Small manifests, and the installation that they belong to, for every harness of the operator."""

from pathlib import Path

import yaml
from tests.tables import data

from marlaas_operator.cluster import Body
from marlaas_operator.installation import Installation

API_VERSION = "marlaas.dev/v1alpha1"
SYSTEM = "marlaas-system"
PLAIN = data(__file__, "installation")


def installation(**given: object) -> Installation:
    return Installation.model_validate({**PLAIN, **given})


def pool(name: str, **spec: object) -> Body:
    return _object("ModelPool", {"name": name}, {"model": {"builtin": "tiny"}, **spec})


def job(namespace: str, name: str, pool: str, **spec: object) -> Body:
    training = {"steps": 4, "groupsPerStep": 2}
    plain = {"poolRef": {"name": pool}, "environment": {"name": "arithmetic"}, "training": training}
    return _object("RLJob", {"name": name, "namespace": namespace}, {**plain, **spec})


def tenant(name: str, *namespaces: str, **spec: object) -> Body:
    return _object("Tenant", {"name": name}, {"namespaces": list(namespaces), **spec})


def namespace(name: str) -> Body:
    return body("v1", "Namespace", "", name)


def body(api_version: str, kind: str, namespace: str, name: str, **metadata: object) -> Body:
    """An object without a spec; in no namespace if that is empty."""
    place = {"namespace": namespace} if namespace else {}
    return {"apiVersion": api_version, "kind": kind, "metadata": {"name": name, **place, **metadata}}


def _object(kind: str, metadata: Body, spec: Body) -> Body:
    return {"apiVersion": API_VERSION, "kind": kind, "metadata": metadata, "spec": spec}


def kubeconfig(folder: Path, server: str) -> Path:
    """Of a client of this server, which asks nobody who he is."""
    config: Body = data(__file__, "kubeconfig")
    config["clusters"][0]["cluster"]["server"] = server
    (folder / "config").write_text(yaml.safe_dump(config))
    return folder / "config"
