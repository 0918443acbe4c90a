"""Program that finds and downloads the objects of a data set (`marlaas.envs.dataset.s3`).

It reads `urls` and `kept`, the file for the list of objects, as JSON from standard input. It writes `found` (URL and path of each object), or
one of `problem` (the manifest must be changed), `refused` and `silent` (the store) as JSON to standard output. An object is downloaded once
for each of its contents; complete ones stay if a later one fails.
"""

import hashlib
import json
import os
import re
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from marlaas.envs.dataset.settings import OBJECTS, endpoint
from marlaas.models.cache import build_once, cache_folder
from marlaas_api.blobs import BlobFull, BlobMissing, BlobRefused, BlobUnavailable
from marlaas_api.blobs_store import ForeignBucket, StoredObject, answer_of
from marlaas_api.errors import InvalidInput
from marlaas_api.prctl import die_with_parent

_MIB = 1 << 20
_WILD = re.compile(r"(\*\*/|\*\*|[*?])")
_AS_REGEX = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}


def main() -> None:
    """Answer the question on standard input."""
    die_with_parent()
    asked = json.load(sys.stdin)
    sys.stdout.write(json.dumps(_answer(asked["urls"], Path(asked["kept"]))))


def _answer(urls: list[str], kept: Path) -> dict[str, object]:
    found: dict[str, str] = {}
    for url in urls:
        try:
            found.update(_fetched(url))
        except BlobMissing:
            return {"problem": f"there is no object {url}"}
        except BlobFull:
            return {
                "problem": f"the disk of the cache {cache_folder()} has no room for {url}: free some, or set MARLAAS_CACHE"
            }
        except BlobUnavailable as error:
            status, code = answer_of(error)
            if code == "NoSuchBucket":
                return {"problem": f"there is no bucket of {url}"}
            what = f"answers {status}{f' ({code})' if code else ''}" if status else "does not answer"
            is_refused = isinstance(error, BlobRefused) or (status[:1] == "4" and status[:3] not in ("408", "429"))
            return {"refused" if is_refused else "silent": f"the store of {url} {what}"}
        except InvalidInput as error:
            return {"problem": str(error)}
    kept.parent.mkdir(parents=True, exist_ok=True)
    part = kept.with_name(f".{kept.name}.{os.getpid()}")
    part.write_text(json.dumps(list(found.items())), encoding="utf-8")
    part.replace(kept)
    return {"found": list(found.items())}


def _fetched(url: str) -> Iterator[tuple[str, str]]:
    """Yield URL and path of each object, after downloading those that the cache lacks."""
    parts = OBJECTS.fullmatch(url)
    assert parts is not None
    begin = f"s3://{parts['bucket']}"
    bucket = ForeignBucket(begin)
    objects = _matching(bucket, parts["key"])
    if not objects:
        raise InvalidInput(f"no object matches {url}")
    for one in objects:
        yield f"{begin}/{one.name}", str(_copied(bucket, begin, one))


def _matching(bucket: ForeignBucket, key: str) -> list[StoredObject]:
    """Return the objects of a key, which may be a pattern: `*` and `?` stay within a folder, `**` does not."""
    wild = _WILD.search(key)
    if wild is None:
        return [bucket.head(key)]
    pattern = re.compile("".join(_AS_REGEX.get(part, re.escape(part)) for part in _WILD.split(key)))
    return [one for one in bucket.below(key[: wild.start()].rpartition("/")[0]) if pattern.fullmatch(one.name)]


def _copied(bucket: ForeignBucket, begin: str, one: StoredObject) -> Path:
    """Return the file of an object in the cache. It is named by the object's version and its endpoint."""
    identity = f"{endpoint()} {begin} {one.name} {one.version} {one.size_bytes}"
    target = cache_folder() / "datasets" / f"s3-{hashlib.sha256(identity.encode()).hexdigest()[:32]}"
    filename = one.name.rpartition("/")[2]
    return build_once(target, partial(_download, bucket, one, filename), one.size_bytes + _MIB) / filename


def _download(bucket: ForeignBucket, one: StoredObject, filename: str, folder: Path) -> None:
    bucket.copy(one, folder / filename)


if __name__ == "__main__":
    main()
