"""The real API server: `Cluster` over `kubernetes.aio`. The only module that imports the Kubernetes client.

It uses the client's connection, credentials and TLS, and none of its models: bodies stay raw.
"""

import asyncio
import contextlib
import json
import ssl
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Any
from urllib.parse import urlencode, urlsplit
from urllib.request import getproxies, proxy_bypass

import aiohttp
from kubernetes.aio.client import ApiClient, Configuration
from kubernetes.aio.config import ConfigException, load_incluster_config, load_kube_config

from marlaas_api.errors import InvalidInput
from marlaas_operator.cluster import FIELD_MANAGER, Body, Resource, Target
from marlaas_operator.cluster.errors import Gone, NoAnswer, NotFound, Unavailable, api_error
from marlaas_operator.cluster.resources import slim, target_of

_load_in_cluster: Callable[..., None] = load_incluster_config
_load_kubeconfig: Callable[..., Awaitable[object]] = load_kube_config
Bodies = list[Body]
_TIMEOUT = aiohttp.ClientTimeout(total=20.0, sock_connect=5.0)
_PAGE = 50
"""Objects in one answer to a list: an answer is parsed as a whole, and an object may have 256 KiB."""
_APPLY = "application/apply-patch+yaml"
_MERGE = "application/merge-patch+json"
_JSON = "application/json"

Observer = Callable[[str, str, int], None]
"""Called after every request with verb, plural (`rljobs` or `rljobs/status`) and HTTP status (0: no answer)."""


async def connect(kubeconfig: Path | None = None, context: str | None = None) -> "ApiServer":
    """Return a client with the credentials of a kubeconfig, or of the pod's service account without one.

    Makes no request.

    Raises:
        InvalidInput: there are no such credentials.
    """
    configuration = Configuration()
    try:
        if kubeconfig is None and context is None:
            _load_in_cluster(client_configuration=configuration)
        else:
            await _load_kubeconfig(
                str(kubeconfig) if kubeconfig else None,
                context=context,
                client_configuration=configuration,
                persist_config=False,
            )
    except (ConfigException, OSError) as error:
        raise InvalidInput(f"no credentials for a Kubernetes API server: {error}") from error
    configuration.proxy = configuration.proxy or _proxy_for(configuration.host)
    # trust_env would read proxy and netrc in a thread before every request; credentials of netrc must not be used anyway.
    configuration.client_session_kwargs = {"trust_env": False}
    return ApiServer(configuration)


def _proxy_for(server: str) -> str | None:
    """Return the proxy for a server by `HTTPS_PROXY` and `NO_PROXY`, None if there is none."""
    url = urlsplit(server)
    return None if not url.hostname or proxy_bypass(url.netloc) else getproxies().get(url.scheme)


@dataclass(frozen=True, slots=True)
class Login:
    """Address and credentials of this user, for another client. token: without its scheme."""

    server: str
    ca_path: str | None
    certificate_path: str | None
    key_path: str | None
    token: str | None
    verify: bool = True


class ApiServer:
    """One API server, accessed as one user. `observe` is called after every request."""

    def __init__(self, configuration: Configuration) -> None:
        self.configuration = configuration
        self._client = ApiClient(configuration)
        self._client.user_agent = FIELD_MANAGER
        self.observe: Observer = lambda verb, plural, status: None

    async def get(self, target: Target) -> Body:
        return await self._call("GET", target.resource.plural, target.path, f"get {target}")

    async def list(self, resource: Resource, *, namespace: str = "", labels: str = "") -> list[Body]:
        query = {"limit": str(_PAGE), "labelSelector": labels}
        try:
            return await self._pages(resource, resource.path(namespace), query)
        except Gone:
            return await self._pages(resource, resource.path(namespace), {"labelSelector": labels})

    async def create(self, body: Body) -> Body:
        target = target_of(body)
        path = target.resource.path(target.namespace)
        return await self._call("POST", target.resource.plural, path, f"create {target}", (_JSON, body))

    async def apply(self, body: Body) -> Body:
        target = target_of(body)
        path = f"{target.path}?{urlencode({'fieldManager': FIELD_MANAGER, 'force': 'true'})}"
        return await self._call("PATCH", target.resource.plural, path, f"apply {target}", (_APPLY, body))

    async def patch(self, target: Target, patch: Body, *, status: bool = False) -> Body:
        part, what = ("/status", f"write the status of {target}") if status else ("", f"patch {target}")
        path = f"{target.path}{part}?{urlencode({'fieldManager': FIELD_MANAGER})}"
        return await self._call("PATCH", f"{target.resource.plural}{part}", path, what, (_MERGE, patch))

    async def delete(self, target: Target, *, uid: str | None = None) -> bool:
        options: Body = {"apiVersion": "v1", "kind": "DeleteOptions", "propagationPolicy": "Background"}
        if uid is not None:
            options["preconditions"] = {"uid": uid}
        try:
            answer = await self._call(
                "DELETE", target.resource.plural, target.path, f"delete {target}", (_JSON, options)
            )
        except NotFound:
            return True
        return answer.get("kind") == "Status"

    async def unserved(self, resources: Iterable[Resource]) -> Sequence[Resource]:
        """Return those that the API server's discovery does not list."""
        listed: set[tuple[str, str]] = set()
        wanted = tuple(resources)
        for version in {resource.api_version for resource in wanted}:
            path = f"/apis/{version}" if "/" in version else f"/api/{version}"
            with contextlib.suppress(NotFound):
                answer = await self._call("GET", "apiresources", path, f"look up the kinds of {version}")
                listed |= {(version, str(entry["name"])) for entry in answer["resources"]}
        return [resource for resource in wanted if (resource.api_version, resource.plural) not in listed]

    async def login(self) -> Login:
        """Return the current credentials; a pod's token is re-read because Kubernetes rotates it."""
        of = self.configuration
        bearer = await of.get_api_key_with_prefix("BearerToken", alias="authorization")
        token = str(bearer).split(" ")[-1] if bearer else None  # "Bearer" of a kubeconfig, "bearer" in a pod
        return Login(of.host, of.ssl_ca_cert, of.cert_file, of.key_file, token, of.verify_ssl)

    async def close(self) -> None:
        close: Callable[[], Awaitable[None]] = self._client.close
        await close()

    async def _pages(self, resource: Resource, path: str, query: dict[str, str]) -> Bodies:
        items: Bodies = []
        token = ""
        while True:
            full = {key: value for key, value in {**query, "continue": token}.items() if value}
            page = await self._call("GET", resource.plural, f"{path}?{urlencode(full)}", f"list {resource.plural}")
            for item in page["items"]:
                items.append(slim({**item, "apiVersion": resource.api_version, "kind": resource.kind}))
            token = str(page["metadata"].get("continue") or "")
            if not token:
                return items

    async def _call(
        self, verb: str, what: str, path: str, action: str, content: tuple[str, Body] | None = None
    ) -> Body:
        """Make one request. action: text for errors, such as `get RLJob a/b`; what: resource for the observer."""
        try:
            status, headers, text = await self._exchange(verb, path, content)
        except (aiohttp.ClientError, TimeoutError, ConnectionError, ssl.SSLError, asyncio.IncompleteReadError) as error:
            self.observe(verb, what, 0)
            cause = str(error) or type(error).__name__
            raise NoAnswer(f"cannot {action}: the API server does not answer ({cause})") from error
        self.observe(verb, what, status)
        if status >= HTTPStatus.BAD_REQUEST:
            raise api_error(status, text, f"cannot {action}", headers.get("Retry-After"))
        return _parsed(text, action)

    async def _exchange(self, verb: str, path: str, content: tuple[str, Body] | None) -> tuple[int, Any, bytes]:
        content_type, body = content or (_JSON, None)
        headers = {"Accept": _JSON, "Content-Type": content_type}
        serialized = await self._client.param_serialize(
            verb, path, header_params=headers, query_params=[], body=body, auth_settings=["BearerToken"]
        )
        send: Callable[..., Awaitable[Any]] = self._client.call_api
        answer = await send(*serialized, _request_timeout=_TIMEOUT)
        return answer.status, answer.headers, await answer.read()


def _parsed(text: bytes, action: str) -> Body:
    try:
        return dict(json.loads(text))
    except ValueError as error:
        raise Unavailable(f"cannot {action}: the response is not JSON ({text[:80]!r})") from error
