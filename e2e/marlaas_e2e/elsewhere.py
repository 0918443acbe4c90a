"""The scenarios on a cluster that is not this machine's node (kind, GKE, ...): what a person says of it, by variables of the environment."""

import os
import shlex
from dataclasses import dataclass, field
from pathlib import Path

HERE = "e2e.local"
"""What names of images begin with on this machine's node, which pulls nothing."""


@dataclass(frozen=True, slots=True)
class Elsewhere:
    """What the variables say; each is None, or empty, where nothing is said.

    context (E2E_CONTEXT): of the kubeconfig. images (E2E_IMAGES): what names of images begin with, a registry that the cluster pulls from.
    load (E2E_LOAD): a command that brings an image there; it is given the archive, and with E2E_IMAGES the name. worker (E2E_WORKER): a whole
    worker image; without it the nodes must have this folder, at the same place. values (E2E_VALUES): a file of the chart's values, on top of ours.
    """

    context: str | None = None
    images: str = HERE
    load: list[str] = field(default_factory=list)
    worker: str | None = None
    values: Path | None = None

    @classmethod
    def said(cls) -> "Elsewhere":
        """As the environment has it now."""
        values = os.environ.get("E2E_VALUES")
        return cls(
            context=os.environ.get("E2E_CONTEXT") or None,
            images=(os.environ.get("E2E_IMAGES") or HERE).rstrip("/"),
            load=shlex.split(os.environ.get("E2E_LOAD", "")),
            worker=os.environ.get("E2E_WORKER") or None,
            values=Path(values).resolve() if values else None,
        )

    def image(self, name: str) -> str:
        """Full name of an image. The tag is fixed and not `latest`, so that the kubelet does not pull what it has."""
        return f"{self.images}/{name}:1"

    def loading(self, archive: Path, name: str) -> list[str | Path] | None:
        """The command that brings an image there; None: whoever runs the tests has seen to it."""
        if not self.load:
            return None
        return [*self.load, archive, *([name] if self.images != HERE else [])]

    def chart_words(self) -> list[str | Path]:
        """Words for `helm install`, after those of this machine's node."""
        values = {f"{part}.image": self.image(part) for part in ("operator", "nats")}
        values["worker.image"] = self.worker or self.image("python")
        if self.worker is not None:
            values |= {"worker.pythonEnvironment.claimName": "", "worker.modelCache.claimName": ""}
        words: list[str | Path] = [word for name, value in values.items() for word in ("--set", f"{name}={value}")]
        return [*words, "--values", self.values] if self.values is not None else words
