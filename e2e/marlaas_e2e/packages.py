"""What a node and images need from the Linux distribution."""

import os
import shutil
import sys
from pathlib import Path

import yaml

from marlaas_e2e.kubectl import run

_SEARCH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_PROGRAMS: dict[str, str] = yaml.safe_load(Path(__file__).with_name("packages.yaml").read_text())["programs"]
_FOR_IMAGES = ("buildah", "debootstrap")
CNI_PLUGINS = Path("/usr/lib/cni")


class NotInstalled(Exception):
    """Something is missing and this process may not install it; the message says what."""


def missing_packages(*, node: bool = True) -> list[str]:
    """Names of Debian's packages, for images and, unless told otherwise, a node. Programs are looked for: another vendor's containerd serves as well."""
    wanted = _PROGRAMS if node else _FOR_IMAGES
    missing = {_PROGRAMS[program] for program in wanted if shutil.which(program, path=_SEARCH) is None}
    if node and not (CNI_PLUGINS / "bridge").exists():
        missing.add("containernetworking-plugins")
    return sorted(missing)


def install(*, node: bool = True) -> None:
    """By apt-get, only what is missing, and only as root. node: as above. Raises NotInstalled, CommandFailed."""
    missing = missing_packages(node=node)
    if not missing:
        return
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        raise NotInstalled(f"Install these first, as root: {' '.join(missing)}")
    print(f"installing {' '.join(missing)}", file=sys.stderr, flush=True)
    apt_get = ["env", "DEBIAN_FRONTEND=noninteractive", "apt-get", "--quiet=2"]
    run([*apt_get, "update"])
    run([*apt_get, "install", "--yes", "--no-install-recommends", *missing])
