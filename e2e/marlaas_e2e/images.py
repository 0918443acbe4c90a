"""Container images without a registry: built by buildah, kept as archives in the cache, tagged `e2e.local/NAME:1` (or as E2E_IMAGES says)."""

import hashlib
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from marlaas_e2e import binaries
from marlaas_e2e.cache import cache_dir, file_lock
from marlaas_e2e.elsewhere import HERE, Elsewhere
from marlaas_e2e.kubectl import run
from marlaas_e2e.node import host

RECIPES = Path(__file__).resolve().parent.parent / "images"
BASE = Elsewhere.said().image("python")
PAUSE = f"{HERE}/pause:1"
DNS = f"{HERE}/coredns:1"
_SUITE = "bookworm"
_PACKAGES = "python3,python3-venv,ca-certificates,libnuma1"
_LEFT_OUT = (
    "./var/cache/apt/*",
    "./var/lib/apt/lists/*",
    "./usr/share/doc/*",
    "./usr/share/man/*",
    "./usr/share/locale/*",
    "./dev/*",
)


@dataclass(frozen=True, slots=True)
class Recipe:
    """What to build: a Dockerfile, its context folder, and its build arguments."""

    tag: str
    dockerfile: Path
    context: Path
    arguments: Mapping[str, str] = field(default_factory=dict)


def build(recipe: Recipe) -> Path:
    """Build an image on top of the base (`--build-arg BASE=`) and return its archive (docker's form).

    Layers are cached, and the archive is written anew only when the image differs. Raises CommandFailed.
    """
    base_archive()
    return _archive(recipe, {"BASE": f"localhost/{BASE}", **recipe.arguments})


def base_archive() -> Path:
    """The image `e2e.local/python:1`: python3 with venv, and the certificates that this machine trusts."""
    with file_lock(_folder() / "base.lock"):
        return _from_one_file(_rootfs(), Recipe(BASE, RECIPES / "base" / "Dockerfile", _rootfs().parent))


def pause_archive() -> Path:
    """The image that holds a pod's namespaces."""
    return _from_binary("pause", PAUSE)


def dns_archive() -> Path:
    return _from_binary("coredns", DNS)


def image_id(archive: Path) -> str:
    return archive.with_suffix(".id").read_text()


def tag_of(archive: Path) -> str:
    """The name that an archive's image is imported under."""
    return str(json.loads(run(["tar", "-xOf", archive, "manifest.json"]))[0]["RepoTags"][0])


def _from_binary(name: str, tag: str) -> Path:
    program = binaries.ensure([name])[name]
    return _from_one_file(program, Recipe(tag, RECIPES / name / "Dockerfile", program.parent))


def _from_one_file(file: Path, recipe: Recipe) -> Path:
    """For a file whose path names its content: buildah need not read it again to know that nothing changed."""
    inputs = f"{file}\n{recipe.dockerfile.read_text()}"
    archive = archive_of(recipe)
    record = archive.with_suffix(".inputs")
    if not (archive.exists() and record.exists() and record.read_text() == inputs):
        _archive(recipe, {})
        record.write_text(inputs)
    return archive


def archive_of(recipe: Recipe) -> Path:
    """Where the archive of an image is, once it was built."""
    return _folder() / (recipe.tag.removeprefix(f"{HERE}/").replace("/", "_").replace(":", "_") + ".image.tar")


def _archive(recipe: Recipe, arguments: Mapping[str, str]) -> Path:
    with file_lock(_folder() / "build.lock"):
        image = _buildah_build(recipe, arguments)
        archive = archive_of(recipe)
        if not archive.exists() or image_id(archive) != image:
            _push(recipe.tag, archive)
            archive.with_suffix(".id").write_text(image)
        return archive


def _buildah_build(recipe: Recipe, arguments: Mapping[str, str]) -> str:
    started = time.monotonic()
    build_arguments = [f"--build-arg={name}={value}" for name, value in arguments.items()]
    with tempfile.NamedTemporaryFile("r") as identity:
        options = ["--isolation=chroot", "--layers", "--timestamp=0", "--quiet", f"--iidfile={identity.name}"]
        place = [f"--file={recipe.dockerfile}", f"--tag=localhost/{recipe.tag}", str(recipe.context)]
        run([*_buildah(), "build", *options, *build_arguments, *place], timeout_s=3000)
        image = identity.read().strip()
    print(f"image {recipe.tag}: built or found in {time.monotonic() - started:.0f} s", file=sys.stderr, flush=True)
    return image


def _push(tag: str, archive: Path) -> None:
    temporary = archive.with_name(f".{archive.name}.new")
    temporary.unlink(missing_ok=True)
    form = "docker-archive"  # layers as they are; the other form packs them, which costs ten times what it saves here
    run([*_buildah(), "push", "--quiet", f"localhost/{tag}", f"{form}:{temporary}:{tag}"], timeout_s=3000)
    temporary.rename(archive)


def _buildah() -> list[str]:
    """A store of our own: the user's images and containers are not touched."""
    return ["buildah", "--storage-driver=overlay", f"--root={_folder()}/storage", f"--runroot={_folder()}/storage-run"]


def _folder() -> Path:
    folder = cache_dir() / "e2e-images"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _rootfs() -> Path:
    """Debian's minimal root file system as a tarball, made once (about a minute)."""
    key = hashlib.sha256(f"{_SUITE} {_PACKAGES} {_LEFT_OUT}".encode()).hexdigest()[:12]
    tarball = _folder() / f"rootfs-{key}" / "rootfs.tar"
    if tarball.exists():
        return tarball
    print("building the base root file system (about a minute, kept)", file=sys.stderr, flush=True)
    tarball.parent.mkdir(parents=True, exist_ok=True)
    work = _folder() / "rootfs.work"
    host.refuse_mounts_under(work)  # deleting follows into them
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir()
    try:
        _debootstrap(work / "root")
        left_out = (f"--exclude={each}" for each in _LEFT_OUT)
        run(["tar", "--numeric-owner", *left_out, f"--directory={work}/root", f"--file={work}/tar", "--create", "."])
        (work / "tar").rename(tarball)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return tarball


def _debootstrap(root: Path) -> None:
    private = ["unshare", "--mount", "--propagation=private"]  # it mounts /proc below the root: that ends with it
    run([*private, "debootstrap", "--variant=minbase", f"--include={_PACKAGES}", _SUITE, root], timeout_s=900)
    trusted = Path("/etc/ssl/certs/ca-certificates.crt")
    if trusted.exists():  # builds inside the image reach the package index by what this machine trusts
        shutil.copy(trusted, root / "etc/ssl/certs/ca-certificates.crt")
