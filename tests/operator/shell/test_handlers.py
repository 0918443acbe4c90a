"""kopf as the watcher: when it does not begin, and what it watches. That it watches is tested on a real API server."""

import asyncio
from collections.abc import Iterable, Sequence

import kopf
import pytest
from kubernetes.aio.client import Configuration

from marlaas_operator.cluster import Body, Resource, Unavailable
from marlaas_operator.cluster.api_server import ApiServer
from marlaas_operator.cluster.resources import KINDS, OWNED, PODS, RLJOBS
from marlaas_operator.handlers import watch_once


def ignored(resource: Resource, kind: str | None, body: Body) -> None:
    """Nothing ever happens."""


@pytest.fixture
def gateway() -> ApiServer:
    """To an address where nobody listens."""
    configuration = Configuration()
    configuration.host = "http://127.0.0.1:9"
    return ApiServer(configuration)


async def test_a_kind_that_is_not_listed_yet_ends_the_watching_which_is_begun_anew(
    gateway: ApiServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def unserved(_: ApiServer, resources: Iterable[Resource]) -> Sequence[Resource]:
        assert {*resources} == {*KINDS, *OWNED}
        return [RLJOBS, PODS]

    monkeypatch.setattr(ApiServer, "unserved", unserved)
    with pytest.raises(Unavailable, match="does not serve rljobs, pods yet"):
        await watch_once(ignored, gateway, asyncio.Event(), 45.0)


def test_every_kind_that_the_operator_knows_has_a_handler() -> None:
    registry = kopf.get_default_registry()
    selectors = {handler.selector for handler in registry._watching.get_all_handlers()}
    assert {(one.group, one.version, one.any_name) for one in selectors} == {
        (one.group, one.version, one.plural) for one in (*KINDS, *OWNED)
    }
