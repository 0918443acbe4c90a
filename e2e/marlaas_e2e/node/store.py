"""The node's images: kept between clusters, so that an archive is read in once."""

import json
from pathlib import Path

from marlaas_e2e.images import image_id, tag_of
from marlaas_e2e.kubectl import CommandFailed, run
from marlaas_e2e.node.layout import Layout


class ImageStore:
    """containerd's store of one layout; containerd must run."""

    def __init__(self, layout: Layout) -> None:
        self._socket = layout.containerd_socket
        self._record = layout.root / "imported.json"

    def answers(self) -> bool:
        """Whether containerd takes requests."""
        if not self._socket.exists():
            return False
        try:
            self._ctr("version")
        except CommandFailed:
            return False
        return True

    def bring(self, archive: Path) -> bool:
        """Import an archive made by `images`, unless the store has this image; True if it was imported."""
        tag, identity = tag_of(archive), image_id(archive)
        if self._imported().get(tag) == identity and tag in self._ctr("images", "ls", "-q").split():
            return False
        self.read_in(archive)
        self._record.write_text(json.dumps(self._imported() | {tag: identity}))
        return True

    def drop(self, tag: str) -> None:
        """Remove an image, under all its names, and what only it needs from the disk."""
        digests = {row[0]: row[2] for row in map(str.split, self._ctr("images", "ls").splitlines()[1:])}
        if names := [name for name, digest in digests.items() if digest == digests.get(tag)]:
            self._ctr("images", "rm", "--sync", *names)
        self._record.write_text(json.dumps({known: mark for known, mark in self._imported().items() if known != tag}))

    def read_in(self, archive: Path) -> None:
        """Import any archive (docker or OCI) whatever the store has."""
        self._ctr("images", "import", str(archive))

    def forget_containers(self) -> None:
        """The last cluster's containers were killed with it; only their records are left."""
        if stale := self._ctr("containers", "ls", "-q").split():
            self._ctr("containers", "rm", *stale)

    def _imported(self) -> dict[str, str]:
        return dict(json.loads(self._record.read_text())) if self._record.exists() else {}

    def _ctr(self, *arguments: str) -> str:
        return run(["ctr", "--address", self._socket, "--namespace", "k8s.io", *arguments])
