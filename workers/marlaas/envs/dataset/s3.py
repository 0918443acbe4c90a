"""Objects of a bucket as files of a source: a child process fetches them, and the list of them is kept in the user's cache.

The store's client has threads and open connections, which an environment must not have: its episodes are forked from it.
"""

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from marlaas.envs.dataset.files import DataFile, data_file
from marlaas.envs.dataset.problems import InvalidArgument, SourceSilent, SourceUnavailable
from marlaas.envs.dataset.settings import endpoint
from marlaas.models.cache import cache_folder
from marlaas_api.blobs import S3_CREDENTIALS

_CHILD = "marlaas.envs.dataset.s3_fetch"
_HOW = (
    "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_SKIP_SIGNATURE=true for a public bucket; in a cluster, they are keys of a Secret "
    "that environment.secretRefs names"
)


def fetched(urls: Sequence[str], *loc: str | int, is_known: bool = False) -> tuple[DataFile, ...]:
    """Return the objects of URLs as files of this machine, in the order of the URLs and then of keys.

    Without credentials, these are the objects that an earlier call on this machine has found: so sandboxes of `marlaas run` need none.

    Args:
        loc: of the URLs below `args`.
        is_known: make no request if an earlier call has found objects.

    Raises:
        InvalidArgument: no object matches, one is of an unknown kind, there are no credentials, or the cache cannot be written.
        SourceUnavailable: the store refuses, or (SourceSilent) does not answer.
    """
    kept = cache_folder() / "datasets" / f"s3-list-{_digest(urls)}.json"
    may_ask = any(name in os.environ for name in S3_CREDENTIALS)
    found = _known(kept) if is_known or not may_ask else None
    if found is None and not may_ask:
        raise InvalidArgument(f"there are no credentials for {urls[0]}: {_HOW}", *loc)
    if found is None:
        found = _asked(urls, kept, *loc)
    return tuple(data_file(Path(path), *loc, url=url) for url, path in found)


def _digest(urls: Sequence[str]) -> str:
    return hashlib.sha256(json.dumps([endpoint(), *urls]).encode()).hexdigest()[:32]


def _known(kept: Path) -> list[tuple[str, str]] | None:
    """Return URLs and paths of the objects that an earlier call has found; None if there was none, or a file is gone."""
    try:
        found = [(str(url), str(path)) for url, path in json.loads(kept.read_bytes())]
    except (OSError, ValueError):
        return None
    return found if all(os.path.exists(path) for _, path in found) else None  # noqa: PTH110


def _asked(urls: Sequence[str], kept: Path, *loc: str | int) -> list[tuple[str, str]]:
    """Let the child process find and download the objects."""
    asked = json.dumps({"urls": list(urls), "kept": str(kept)})
    child = subprocess.run([sys.executable, "-P", "-s", "-m", _CHILD], input=asked, capture_output=True, text=True)
    if child.returncode:
        last = child.stderr.strip().splitlines()[-1:]
        text = "".join(f": {line:.300}" for line in last)
        raise SourceUnavailable(
            f"the process that fetches {urls[0]} ended with exit code {child.returncode}{text}", *loc
        )
    answer = json.loads(child.stdout)
    if "refused" in answer:
        raise SourceUnavailable(f"{answer['refused']}; {_HOW}", *loc)
    if "silent" in answer:
        how = "check AWS_ENDPOINT_URL and AWS_REGION; in a cluster, environment.egress must allow the store"
        raise SourceSilent(f"{answer['silent']}; {how}", *loc)
    if "problem" in answer:
        raise InvalidArgument(answer["problem"], *loc)
    return [(url, path) for url, path in answer["found"]]
