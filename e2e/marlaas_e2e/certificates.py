"""A throw-away certificate authority, by the openssl command (elliptic keys: half a second for a whole cluster)."""

import re
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

_DAYS = "30"


@dataclass(frozen=True, slots=True)
class KeyPair:
    """A private key and what proves it, as PEM files."""

    certificate: Path
    key: Path


class Authority:
    """Signs certificates into one folder; files that exist are kept, so that a restarted server is the same one."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self.own = KeyPair(folder / "ca.crt", folder / "ca.key")
        if not self.own.certificate.exists():
            self._key(self.own.key)
            content = ("-key", self.own.key, "-subj", "/CN=e2e", "-days", _DAYS)
            _openssl("req", "-x509", "-new", *content, "-out", self.own.certificate)

    def server(self, name: str, addresses: Sequence[str]) -> KeyPair:
        """A serving certificate for DNS names and IP addresses."""
        alternatives = ",".join(f"{'IP' if re.fullmatch(r'[0-9.]+', each) else 'DNS'}:{each}" for each in addresses)
        return self._signed(name, f"/CN={name}", f"subjectAltName={alternatives}")

    def client(self, user: str, groups: Sequence[str] = (), addresses: Sequence[str] = ()) -> KeyPair:
        """A certificate that authenticates `user` with `groups`; with addresses it also serves there (the kubelet's)."""
        subject = "".join(f"/O={group}" for group in groups) + f"/CN={user}"
        usage = "extendedKeyUsage=clientAuth,serverAuth"
        if addresses:
            usage += "\nsubjectAltName=" + ",".join(f"IP:{each}" for each in addresses)
        return self._signed(re.sub(r"[^a-zA-Z0-9.-]", "_", "-".join((user, *groups))), subject, usage)

    def signing_key(self, name: str) -> KeyPair:
        """A bare key pair (service account tokens): `certificate` is the public key."""
        pair = KeyPair(self.folder / f"{name}.pub", self.folder / f"{name}.key")
        if not pair.certificate.exists():
            self._key(pair.key)
            _openssl("ec", "-in", pair.key, "-pubout", "-out", pair.certificate)
        return pair

    def _signed(self, name: str, subject: str, extensions: str) -> KeyPair:
        pair = KeyPair(self.folder / f"{name}.crt", self.folder / f"{name}.key")
        if pair.certificate.exists():
            return pair
        request, extension_file = self.folder / f"{name}.csr", self.folder / f"{name}.ext"
        self._key(pair.key)
        extension_file.write_text(extensions + "\n")
        _openssl("req", "-new", "-key", pair.key, "-subj", subject, "-out", request)
        authority = ("-CA", self.own.certificate, "-CAkey", self.own.key, "-CAcreateserial")
        content = ("-in", request, "-days", _DAYS, "-extfile", extension_file)
        _openssl("x509", "-req", *content, *authority, "-out", pair.certificate)
        return pair

    def _key(self, target: Path) -> None:
        _openssl("ecparam", "-name", "prime256v1", "-genkey", "-noout", "-out", target)


def _openssl(*arguments: str | Path) -> None:
    done = subprocess.run(["openssl", *map(str, arguments)], capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"openssl {arguments[0]}: {done.stderr.strip()}")
