"""Errors of a cluster, as sentences for the user, and the parsing of kubectl's standard error into them. Pure.

The patterns are texts of kubectl and the API server, 1.30 and later.
"""

import re
from collections.abc import Callable

from marlaas_api.errors import InvalidInput, MarlaasError, Permanent, Retryable


class KubectlMissing(Permanent):
    """kubectl is not on PATH."""


class NoCluster(Permanent):
    """The kubeconfig names no cluster, or does not have the requested context."""


class ClusterSilent(Retryable):
    """The API server does not answer."""


class NotLoggedIn(Permanent):
    """The API server rejects the user's credentials."""


class AccessDenied(Permanent):
    """The user's permissions do not allow this request."""


class ObjectMissing(Permanent):
    """The object does not exist."""


class KindsMissing(Permanent):
    """MARLaaS's CRDs are not installed in the cluster."""


class Refused(InvalidInput):
    """The API server rejects an object. `causes` holds (field, sentence) for each wrong field that it names."""

    def __init__(self, text: str, causes: tuple[tuple[str, str], ...] = ()) -> None:
        super().__init__(text)
        self.causes = causes


class CommandFailed(Permanent):
    """kubectl failed with an error that no pattern matches; the text is kubectl's own."""


INSTALL = "install MARLaaS (helm install marlaas charts/marlaas), or choose another --context"
ASK = "ask the platform team for a role: edit or view in the namespace, or <release>-platform-editor for pools and tenants"

_CAUSE = re.compile(r"^\* (?P<field>[^:\s]+): (?P<text>.*)$", re.MULTILINE)
_UNDECLARED = re.compile(
    r"failed to create typed patch object .*: \.(?P<field>\S+): (?P<text>field not declared in schema)"
)
_ONE_CAUSE = re.compile(r" is invalid: (?P<field>[a-z<][^:\s]*): (?P<text>.*)$", re.DOTALL)
_NOISE = re.compile(
    r"^(?:error: |Error from server(?: \(\w+\))?: |The )|error validating \S+ error validating data: |failed to download openapi: ",
    re.MULTILINE,
)


def error_of(stderr: str) -> MarlaasError:
    """Return the error that a failed kubectl call stands for."""
    text = _without_warnings(stderr)
    for pattern, make in _MEANINGS:
        if re.search(pattern, text):
            return make(text)
    return CommandFailed(_plain(text) or "kubectl failed without an error text")


def _without_warnings(stderr: str) -> str:
    """Remove warnings and log lines: discovery logs its retries before the actual error."""
    lines = [
        line
        for line in stderr.splitlines()
        if not re.match(r"(?:[EWI]\d{4} |Warning: |Defaulted container |command terminated with exit code)", line)
    ]
    return "\n".join(lines).strip()


def _plain(text: str) -> str:
    return _NOISE.sub("", text).strip()


def _kinds_missing(text: str) -> MarlaasError:
    return KindsMissing(f"the cluster does not have MARLaaS's CRDs: {INSTALL}")


def _silent(text: str) -> MarlaasError:
    reason = _plain(text).splitlines()[-1].partition("; if you choose to ignore")[0]
    return ClusterSilent(f"the cluster does not answer: {reason}")


def _no_cluster(text: str) -> MarlaasError:
    reason = _plain(text).splitlines()[0].partition("; if you choose to ignore")[0]
    if "localhost:8080" in text:  # kubectl's default address when it has no kubeconfig
        reason = "there is no kubeconfig, or it names no cluster"
    return NoCluster(
        f"no usable cluster is configured: {reason}; see `kubectl config get-contexts`, then give --context or --kubeconfig"
    )


def _forbidden(text: str) -> MarlaasError:
    return AccessDenied(f"not allowed: {_plain(text)}; {ASK}")


def _refused(text: str) -> MarlaasError:
    causes = tuple((match["field"], match["text"].strip()) for match in _CAUSE.finditer(text))
    if not causes:
        single = _ONE_CAUSE.search(text) or _UNDECLARED.search(text)
        causes = ((single["field"], single["text"].strip()),) if single else ()
    return Refused(_plain(text), causes)


def _plain_error(error: type[MarlaasError], template: str = "{}") -> Callable[[str], MarlaasError]:
    return lambda text: error(template.format(_plain(text)))


_MEANINGS: tuple[tuple[str, Callable[[str], MarlaasError]], ...] = (
    (
        r"the server doesn't have a resource type|no matches for kind|could not find the requested resource",
        _kinds_missing,
    ),
    (
        r"localhost:8080|context .* does not exist|context was not found|no configuration has been provided",
        _no_cluster,
    ),
    (r"stat .*: no such file or directory|error loading config file|Error in configuration|x509: ", _no_cluster),
    (r"\(Unauthorized\)|must be logged in|getting credentials", _plain_error(NotLoggedIn, "not logged in: {}")),
    (
        r"connection .*refused|Unable to connect|i/o timeout|TLS handshake timeout|no such host|ServiceUnavailable",
        _silent,
    ),
    (r"Client\.Timeout|connection reset|context deadline exceeded|\(InternalError\)|\(Timeout\)|EOF$", _silent),
    (
        r"\(Invalid\)| is invalid:|\(BadRequest\)|\(UnprocessableEntity\)|ValidatingAdmissionPolicy|denied the request|typed patch object",
        _refused,
    ),
    (r"\(Forbidden\)", _forbidden),
    (r"\(NotFound\)", _plain_error(ObjectMissing)),
)
