"""Desired state of a run, read from the manifests."""

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
"""Difference between the creation times of consecutive jobs, so that the queue has the order of the files."""


@dataclass(frozen=True, slots=True)
class DesiredState:
    """Jobs, pools and module folders of a run.

    jobs: with new uids and creation times, which apply to new jobs only.
    pools: only pools that the jobs use.
    folders: folders that may hold environment modules.
    """

    jobs: tuple[JobDocument, ...]
    pools: tuple[ModelPool, ...]
    folders: tuple[Path, ...] = ()
    notes: tuple[str, ...] = ()


def read(files: Sequence[str], seed: int | None) -> DesiredState:
    """Read the manifests. Raises InvalidManifest with all findings."""
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
