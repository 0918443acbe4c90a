"""What a node and images need from the Linux distribution."""

import os
import shutil
import sys
from pathlib import Path

from marlaas_e2e.kubectl import run

_SEARCH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_PROGRAMS = {
    "buildah": "buildah",
    "containerd": "containerd",
    "conntrack": "conntrack",
    "ctr": "containerd",
    "debootstrap": "debootstrap",
    "ip": "iproute2",
    "ipset": "ipset",
    "iptables": "iptables",
    "nft": "nftables",
    "openssl": "openssl",
    "runc": "runc",
}
CNI_PLUGINS = Path("/usr/lib/cni")


class NotInstalled(Exception):
    """Something is missing and this process may not install it; the message says what."""


def missing_packages() -> list[str]:
    """Names of Debian's packages. Programs are looked for, not packages: another vendor's containerd serves as well."""
    missing = {package for program, package in _PROGRAMS.items() if shutil.which(program, path=_SEARCH) is None}
    if not (CNI_PLUGINS / "bridge").exists():
        missing.add("containernetworking-plugins")
    return sorted(missing)


def install() -> None:
    """By apt-get, only what is missing, and only as root. Raises NotInstalled, CommandFailed."""
    missing = missing_packages()
    if not missing:
        return
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        raise NotInstalled(f"Install these first, as root: {' '.join(missing)}")
    print(f"installing {' '.join(missing)}", file=sys.stderr, flush=True)
    apt_get = ["env", "DEBIAN_FRONTEND=noninteractive", "apt-get", "--quiet=2"]
    run([*apt_get, "update"])
    run([*apt_get, "install", "--yes", "--no-install-recommends", *missing])
