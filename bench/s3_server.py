"""As much of S3 as a client of it can lean on: buckets by path, listings page by page, uploads in parts, and failures; in memory, on 127.0.0.1."""

import contextlib
import hashlib
import re
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from urllib.parse import parse_qs, unquote, urlsplit
from xml.etree import ElementTree

from bench import loopback

ACCESS_KEY = "access-key"
VERBS = ("GET", "HEAD", "PUT", "POST", "DELETE")
PAGE = 2
"""Keys of one page of a listing: few, so that every listing has several."""


@dataclass
class Bucket:
    """What is stored, and how the server fails.

    busy: so many of the next requests are answered 503. refusal: status and code of every answer to requests of `refused` verbs.
    silence: until it is set, requests are accepted and wait; they are never answered.
    """

    objects: dict[str, bytes] = field(default_factory=dict)
    parts: dict[str, dict[int, bytes]] = field(default_factory=dict)
    busy: int = 0
    refusal: tuple[int, str] | None = None
    refused: tuple[str, ...] = VERBS
    silence: threading.Event | None = None
    asked: Counter[str] = field(default_factory=Counter)
    lock: threading.Lock = field(default_factory=threading.Lock)
    url: str = ""

    @property
    def variables(self) -> dict[str, str]:
        """Environment of a client, as a pod has it of the chart's `blobs.secretName`."""
        given = {"ENDPOINT": self.url, "ACCESS_KEY_ID": ACCESS_KEY, "SECRET_ACCESS_KEY": "secret", "REGION": "here"}
        return {f"AWS_{name}": value for name, value in given.items()}


@contextlib.contextmanager
def serving() -> Iterator[Bucket]:
    """A server with one bucket."""
    bucket = Bucket()
    verbs = {f"do_{verb}": _Handler.serve for verb in VERBS}
    handler = type("OneBucket", (_Handler,), {"bucket": bucket, **verbs})
    with loopback.serving(handler) as bucket.url:
        yield bucket


class _Handler(BaseHTTPRequestHandler):
    bucket: Bucket
    protocol_version = "HTTP/1.1"

    def serve(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if (silence := self.bucket.silence) is not None:
            self.close_connection = silence.wait()
            return
        url = urlsplit(self.path)
        query = {name: values[0] for name, values in parse_qs(url.query, keep_blank_values=True).items()}
        with self.bucket.lock:
            self.bucket.asked[self.command] += 1
            status, content = self._refused() or self._answer(unquote(url.path), query, body)
        tag, total = _tag(body if self.command == "PUT" else content), len(content)
        wanted = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        if wanted is not None and self.command == "GET" and status == 200:
            first, last = int(wanted[1]), min(int(wanted[2]), total - 1)
            status, content = 206, content[first : last + 1]
        self.send_response(status)
        if status == 206:
            self.send_header("Content-Range", f"bytes {first}-{last}/{total}")
        self.send_header("ETag", f'"{tag}"')
        self.send_header("Last-Modified", "Sat, 21 Nov 2026 09:00:00 GMT")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def _refused(self) -> tuple[int, bytes] | None:
        if f"Credential={ACCESS_KEY}/" not in self.headers.get("Authorization", ""):
            return 403, _error("InvalidAccessKeyId")
        if self.bucket.refusal is not None and self.command in self.bucket.refused:
            status, code = self.bucket.refusal
            return status, _error(code)
        if self.bucket.busy > 0:
            self.bucket.busy -= 1
            return 503, _error("SlowDown")
        return None

    def _answer(self, path: str, query: dict[str, str], body: bytes) -> tuple[int, bytes]:
        name = path.strip("/").partition("/")[2]
        if self.command == "POST" and "delete" in query:
            return 200, self._delete_many(body)
        if "uploads" in query or "uploadId" in query:
            return self._in_parts(name, query, body)
        if self.command == "PUT":
            self.bucket.objects[name] = body
            return 200, b""
        if self.command == "DELETE":
            self.bucket.objects.pop(name, None)
            return 204, b""
        if not name:
            return 200, self._listing(query)
        found = self.bucket.objects.get(name)
        return (404, _error("NoSuchKey")) if found is None else (200, found)

    def _delete_many(self, body: bytes) -> bytes:
        keys = [str(key.text) for key in ElementTree.fromstring(body).findall(".//{*}Key")]
        for key in keys:
            self.bucket.objects.pop(key, None)
        deleted = "".join(f"<Deleted><Key>{key}</Key></Deleted>" for key in keys)
        return f"<DeleteResult>{deleted}</DeleteResult>".encode()

    def _in_parts(self, name: str, query: dict[str, str], body: bytes) -> tuple[int, bytes]:
        if "uploads" in query:
            number = str(len(self.bucket.parts) + 1)
            self.bucket.parts[number] = {}
            answer = f"<InitiateMultipartUploadResult><UploadId>{number}</UploadId></InitiateMultipartUploadResult>"
            return 200, answer.encode()
        parts = self.bucket.parts[query["uploadId"]]
        if self.command == "PUT":
            parts[int(query["partNumber"])] = body
        elif self.command == "POST":
            self.bucket.objects[name] = b"".join(parts[number] for number in sorted(parts))
            tag = _tag(self.bucket.objects[name])
            return 200, f"<CompleteMultipartUploadResult><ETag>{tag}</ETag></CompleteMultipartUploadResult>".encode()
        else:
            parts.clear()
        return 200, b""

    def _listing(self, query: dict[str, str]) -> bytes:
        after, prefix = query.get("continuation-token", ""), query.get("prefix", "")
        names = [name for name in sorted(self.bucket.objects) if name.startswith(prefix) and name > after]
        page, more = names[:PAGE], len(names) > PAGE
        items = "".join(
            f"<Contents><Key>{name}</Key><LastModified>2026-11-21T09:00:00Z</LastModified>"
            f"<ETag>{_tag(self.bucket.objects[name])}</ETag><Size>{len(self.bucket.objects[name])}</Size></Contents>"
            for name in page
        )
        token = f"<NextContinuationToken>{page[-1]}</NextContinuationToken>" if more else ""
        return f"<ListBucketResult><IsTruncated>{str(more).lower()}</IsTruncated>{token}{items}</ListBucketResult>".encode()

    def log_message(self, *_: object) -> None:
        return


def _tag(content: bytes) -> str:
    return hashlib.md5(content, usedforsecurity=False).hexdigest()


def _error(code: str) -> bytes:
    return f"<Error><Code>{code}</Code><Message>{code}</Message></Error>".encode()
