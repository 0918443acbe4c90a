"""Gateway to Weights & Biases. The library itself reads WANDB_PROJECT, WANDB_ENTITY, WANDB_MODE and the API key.

Without a mode and a key it works offline; `wandb sync` can upload the files in the job's folder later.
"""

import netrc
import os
from pathlib import Path

import wandb

from marlaas.trackers.seam import DATA, End, MetricRow, settings
from marlaas_api.messages import JobDocument

_HOST = "api.wandb.ai"
_AXIS = "finished_steps"
_LONGEST_TAG = 64


class WandbTracker:
    """A W&B run whose id is the job's uid, so that a later process resumes it.

    Its steps are the row numbers. A resumed run begins at the number of rows that the server has, and the server ignores
    rows below it.
    """

    def __init__(self, run: wandb.Run, folder: Path) -> None:
        self._run = run
        self._folder = folder
        self._num_known = run.starting_step
        self._data_digest = ""
        run.define_metric(_AXIS)
        run.define_metric("*", step_metric=_AXIS)

    @property
    def where(self) -> str:
        return self._run.url or f"wandb sync {self._folder / 'wandb'}/offline-run-*"

    def log(self, number: int, row: MetricRow) -> None:
        if row.data_digest not in ("", self._data_digest):
            self._run.config.update({DATA: row.data_digest}, allow_val_change=True)  # type: ignore[no-untyped-call]
            self._data_digest = row.data_digest
        columns, samples = row.table
        table = {"samples": wandb.Table(columns=columns, data=samples)} if samples else {}
        self._run.log({**row.values, **table, _AXIS: row.finished}, step=number)

    def has(self, number: int, row: MetricRow) -> bool:
        return number < self._num_known

    def close(self, end: End | None) -> None:
        self._run.finish(exit_code=0 if end in (None, End.SUCCEEDED) else 1)


def open_tracker(document: JobDocument, folder: Path) -> WandbTracker:
    """Resume or create the run with the job's uid."""
    folder.mkdir(parents=True, exist_ok=True)
    run = wandb.init(
        project=os.environ.get("WANDB_PROJECT", "marlaas"),
        id=document.uid,
        name=str(document.ref),
        group=document.namespace,
        tags=(document.namespace[:_LONGEST_TAG], document.job[:_LONGEST_TAG], document.uid[:_LONGEST_TAG]),
        dir=str(folder),
        mode=None if _may_be_online() else "offline",
        resume="allow",
        config=settings(document),
        settings=wandb.Settings(console="off", silent=True, disable_git=True, save_code=False),
    )
    return WandbTracker(run, folder)


def _may_be_online() -> bool:
    """Return whether WANDB_MODE is set or an API key is configured."""
    if "WANDB_MODE" in os.environ or "WANDB_API_KEY" in os.environ:
        return True
    try:
        return netrc.netrc().authenticators(_HOST) is not None
    except (OSError, netrc.NetrcParseError):
        return False
