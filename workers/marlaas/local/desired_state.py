"""From manifests to what a run is to do; the last word on what a person wrote."""

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from marlaas.local.plan import pool_names
from marlaas.manifest import load
from marlaas_api.documents import job_document
from marlaas_api.kinds import ModelPool
from marlaas_api.messages import JobDocument

_APART_S = 1e-3
"""Between the times of creation of two jobs of the same manifests, so that the queue is in the order of the files."""


@dataclass(frozen=True, slots=True)
class DesiredState:
    """jobs have fresh uids and times of creation, which count for new jobs only. pools: those that jobs use. folders: where environment modules may lie."""

    jobs: tuple[JobDocument, ...]
    pools: tuple[ModelPool, ...]
    folders: tuple[Path, ...] = ()
    notes: tuple[str, ...] = ()


def read(files: Sequence[str], seed: int | None) -> DesiredState:
    """Read the manifests. Raises InvalidManifest with everything that is wrong with them."""
    manifest, now = load(files), time.time()
    jobs = tuple(
        job_document(job, manifest.tenants, str(uuid.uuid4()), seed, now + position * _APART_S)
        for position, job in enumerate(manifest.jobs)
    )
    used = {name for job in jobs for name in pool_names(job)}
    return DesiredState(
        jobs,
        tuple(pool for pool in manifest.pools if pool.metadata.name in used),
        manifest.folders,
        tuple(str(note) for note in manifest.notes),
    )
