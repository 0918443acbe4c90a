"""A POST of JSON that follows no redirect."""

import urllib.request
from collections.abc import Mapping


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Follow no redirect: it would repeat a POST as a GET, take credentials to another host, or lead to an address inside the cluster."""

    def redirect_request(self, *_: object) -> None:
        return None


def post_json(url: str, body: bytes, timeout_s: float, headers: Mapping[str, str] | None = None) -> bytes:
    """Post JSON, and return the answer's body. Raises HTTPError (also of a redirect), URLError, OSError, HTTPException, ValueError."""
    given = {"Content-Type": "application/json", **(headers or {})}
    request = urllib.request.Request(url, body, given, method="POST")
    with urllib.request.build_opener(_NoRedirect).open(request, timeout=timeout_s) as response:
        answer: bytes = response.read()
    return answer
