"""Collections of an API server's objects, kept in memory by a watch each, as the informers of client libraries do."""

import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence

from marlaas_e2e.api import ApiClient, ApiError, Object

_PAUSE_S = 0.5
"""Seconds between an error and the next list."""


class CollectionCache:
    """Cache of the objects of some collections.

    One daemon thread per collection lists and watches it until the process ends. The constructor returns when all collections have
    been listed.

    connect: makes a client; each thread has its own. paths: of the collections.
    """

    def __init__(self, connect: Callable[[], ApiClient], paths: Sequence[str]) -> None:
        self._connect = connect
        self._objects: dict[str, dict[str, Object]] = {}
        self._changed = threading.Event()
        self._listed = threading.Semaphore(0)
        for path in paths:
            threading.Thread(target=self._follow, args=(path,), name=f"watch {path}", daemon=True).start()
        for _ in paths:
            self._listed.acquire()

    def objects(self, path: str) -> list[Object]:
        """The objects of a collection, as last seen."""
        return [*self._objects[path].values()]

    def wait(self, timeout_s: float) -> None:
        """Wait until an object changes after the last wait, at most `timeout_s`."""
        self._changed.wait(timeout_s)
        self._changed.clear()

    def _follow(self, path: str) -> None:
        try:
            self._follow_for_ever(path)
        except BaseException:
            traceback.print_exc()
            os._exit(1)  # rather than answer from a collection that no thread follows

    def _follow_for_ever(self, path: str) -> None:
        client, said = self._connect(), ""
        while True:
            try:
                self._list_and_watch(client, path)
                said = ""
            except ApiError as error:
                if (now := f"{path}: {error}") != said:
                    print(now, file=sys.stderr, flush=True)
                    said = now
                time.sleep(_PAUSE_S)

    def _list_and_watch(self, client: ApiClient, path: str) -> None:
        """List the collection, then apply the events of a watch until the server closes it. Raises ApiError."""
        answer = client.get(path)
        is_first = path not in self._objects
        self._objects[path] = {one["metadata"]["uid"]: one for one in answer.get("items") or []}
        self._changed.set()
        if is_first:
            self._listed.release()
        for event in client.watch(path, answer["metadata"]["resourceVersion"]):
            one = event["object"]
            known = dict(self._objects[path])
            if event["type"] == "DELETED":
                known.pop(one["metadata"]["uid"], None)
            else:
                known[one["metadata"]["uid"]] = one
            self._objects[path] = known  # a new dictionary, because other threads read the old one
            self._changed.set()
