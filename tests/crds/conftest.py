"""The API server over plain HTTP, so that a test sees what it says, not what a library makes of it."""

import ssl
from collections.abc import Iterator
from types import TracebackType
from typing import Any, Self

import httpx
import pytest
from tools.crd import PRESENTATIONS

from marlaas_api.kinds import GROUP, VERSION, RLJob
from marlaas_e2e.control_plane import ControlPlane

Json = Any
NAMESPACE = "default"


class Api:
    """One connection as the administrator; each call is one request."""

    def __init__(self, plane: ControlPlane) -> None:
        context = ssl.create_default_context(cafile=str(plane.authority))
        context.load_cert_chain(plane.admin.certificate, plane.admin.key)
        self._client = httpx.Client(base_url=plane.url, verify=context, timeout=60, trust_env=False)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._client.close()

    def create(self, body: Json, *, dry: bool = False, fields: str = "Strict") -> Json:
        options = {"fieldValidation": fields, **_dry(dry)}
        return self._client.post(_collection(body["kind"]), params=options, json=body).json()

    def replace(self, body: Json, *, dry: bool = False) -> Json:
        """The object after everything of it but its status was given anew, or the Status that says why not."""
        at = f"{_collection(body['kind'])}/{body['metadata']['name']}"
        version = self._client.get(at).json()["metadata"]["resourceVersion"]
        whole = {**body, "metadata": {**body["metadata"], "resourceVersion": version}}
        return self._client.put(at, params={"fieldValidation": "Strict", **_dry(dry)}, json=whole).json()

    def patch(self, kind: str, name: str, change: Json, *, status: bool = False, dry: bool = True) -> Json:
        """The object after a merge patch of it or of its status, or the Status that says why not."""
        path = f"{_collection(kind)}/{name}{'/status' if status else ''}"
        headers = {"content-type": "application/merge-patch+json"}
        options = {"fieldValidation": "Strict", **_dry(dry)}
        return self._client.patch(path, params=options, json=change, headers=headers).json()

    def get(self, kind: str, name: str) -> Json:
        return self._client.get(f"{_collection(kind)}/{name}").json()

    def table(self, kind: str) -> Json:
        """What `kubectl get` shows: columns and rows."""
        headers = {"accept": "application/json;as=Table;v=v1;g=meta.k8s.io"}
        return self._client.get(_collection(kind), headers=headers).json()

    def delete(self, kind: str, name: str) -> None:
        """Delete an object that has no finalizer."""
        self._client.delete(f"{_collection(kind)}/{name}").raise_for_status()


def problems(answer: Json) -> set[tuple[str, str]]:
    """(field, sentence) of each cause for which an object was refused; empty if it was taken."""
    if answer["kind"] != "Status" or answer["status"] == "Success":
        return set()
    causes = answer.get("details", {}).get("causes", [])
    return {(cause.get("field", ""), cause["message"]) for cause in causes} or {("", answer["message"])}


def _collection(kind: str) -> str:
    where = f"/namespaces/{NAMESPACE}" if kind == RLJob.__name__ else ""
    return f"/apis/{GROUP}/{VERSION}{where}/{PRESENTATIONS[kind].plural}"


def _dry(dry: bool) -> dict[str, str]:
    return {"dryRun": "All"} if dry else {}


@pytest.fixture(scope="session")
def plane(control_plane: ControlPlane) -> ControlPlane:
    """The API server without objects of our kinds: other tests share it."""
    control_plane.kubectl("delete", "rljobs,modelpools,tenants", "--all", "--all-namespaces")
    return control_plane


@pytest.fixture(scope="session")
def api(plane: ControlPlane) -> Iterator[Api]:
    """The API server over HTTP, as its administrator."""
    with Api(plane) as connected:
        yield connected
