"""The cache of the e2e's node agent follows a collection through changes and failures."""

import threading
from collections.abc import Iterator

from marlaas_e2e.api import ApiClient, ApiError, Object
from marlaas_e2e.collection_cache import CollectionCache

PODS = "/api/v1/pods"


def pod(uid: str, phase: str = "Pending") -> Object:
    return {"metadata": {"uid": uid}, "status": {"phase": phase}}


class ScriptedClient(ApiClient):
    """Answers from a script: first a list, then the events of its watch, and so on; the last watch has no end.

    asked: resource versions of the watches.
    """

    def __init__(self, *script: list[Object] | ApiError) -> None:
        self._script = iter(script)
        self.asked: list[str] = []

    def get(self, path: str) -> Object:
        assert path == PODS
        match next(self._script):
            case ApiError() as error:
                raise error
            case items:
                return {"metadata": {"resourceVersion": f"{len(items)} items"}, "items": items}

    def watch(self, path: str, version: str) -> Iterator[Object]:
        assert path == PODS
        self.asked.append(version)
        match next(self._script, None):
            case None:
                threading.Event().wait()
            case ApiError() as error:
                raise error
            case events:
                yield from events


def test_it_applies_events_and_lists_anew_after_the_end_of_a_watch_and_after_errors(monkeypatch, capsys):
    monkeypatch.setattr("marlaas_e2e.collection_cache._PAUSE_S", 0.0)
    events = [("ADDED", pod("b")), ("MODIFIED", pod("a", "Running")), ("DELETED", pod("b"))]
    told = [{"type": kind, "object": one} for kind, one in events]
    gone = ApiError(410, "too old")
    script = ([pod("a")], told, [pod("a", "Running")], gone, gone, [pod("a", "Running"), pod("c")])
    client = ScriptedClient(*script)
    cache = CollectionCache(lambda: client, [PODS])
    while (found := cache.objects(PODS)) != [pod("a", "Running"), pod("c")]:
        assert found in ([pod("a")], [pod("a"), pod("b")], [pod("a", "Running"), pod("b")], [pod("a", "Running")])
        cache.wait(60)
    assert client.asked[:2] == ["1 items", "1 items"]
    assert capsys.readouterr().err.count("410: too old") == 1
