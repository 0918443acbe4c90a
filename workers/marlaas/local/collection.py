"""Write a job's output files from the bus and the blob store: records, curve, adapter, exported copy, summary."""

import contextlib
import json
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path

from marlaas.local import adapter
from marlaas.local.curves import CurveRequest
from marlaas.local.folder import ModuleFile, OutFolder, RunRecord, write
from marlaas.local.records import RecordFile, read_line
from marlaas.local.results import Failure, JobResult, summary
from marlaas_api.blobs import Blobs
from marlaas_api.bus import Bus
from marlaas_api.errors import InvalidInput
from marlaas_api.messages import EvalRecord, JobDocument, Phase, PoolDocument, Progress, StepRecord
from marlaas_api.policy_manifest import find_manifest

log = logging.getLogger(__name__)
_FIRST_EPISODES = 256

RecordListener = Callable[[JobDocument, Sequence[StepRecord], Sequence[EvalRecord]], None]
"""Called with all records of a job so far whenever there are new ones; must return at once."""


def _ignore_records(document: JobDocument, steps: Sequence[StepRecord], evals: Sequence[EvalRecord]) -> None:
    """Default listener: ignore the records."""


def _ignore_curve(request: CurveRequest) -> None:
    """Draw no curve."""


@dataclass(slots=True)
class Collector:
    """Updates the output folder from the bus. Errors of the bus and the store are raised to the caller, and retried later.

    on_curve: called when a job's curve is to be drawn; its records are written. pools: of the run, by name.
    """

    folder: OutFolder
    bus: Bus
    blobs: Blobs
    on_records: RecordListener = _ignore_records
    on_curve: Callable[[CurveRequest], None] = _ignore_curve
    pools: Mapping[str, PoolDocument] = field(default_factory=dict)
    _records: dict[str, RecordFile] = field(default_factory=dict)
    _seen: dict[str, tuple[object, ...]] = field(default_factory=dict)
    _drawn: dict[str, tuple[int, int]] = field(default_factory=dict)
    _published: set[tuple[str, str, int, Phase]] = field(default_factory=set)

    async def follow(self, document: JobDocument, progress: Progress | None) -> None:
        """Write a job's new records; once the job is final, also its curve and adapters.

        Raises InvalidInput, and the errors of the bus and the store.
        """
        mark = (progress.step, progress.eval_last, progress.phase, progress.versions) if progress else ()
        if self._seen.get(document.uid) == mark:
            return
        await self.write_records(document)
        if progress is not None and progress.phase.final:
            await self.publish(JobResult(document, progress, *self._records[document.uid].in_order()))
        self._seen[document.uid] = mark

    async def write_records(self, document: JobDocument) -> None:
        """Rewrite `steps.jsonl` and `evals.jsonl` if the stream has new records."""
        records = self._records.setdefault(document.uid, RecordFile(document.ref))
        if await records.read(self.bus) or not (self.folder.job(document.ref) / "steps.jsonl").exists():
            records.write(self.folder)
            self.on_records(document, *records.in_order())
        self.folder.link_logs(document.ref)

    def keep(self, uids: Collection[str]) -> None:
        """Forget all jobs but these. Their files stay."""
        for known in (self._records, self._seen, self._drawn):
            for uid in known.keys() - uids:
                del known[uid]
        self._published = {key for key in self._published if key[0] in uids}

    async def result(self, document: JobDocument, progress: Progress | None, failure: Failure | None) -> JobResult:
        """Return the job's current result, after writing all its files."""
        await self.write_records(document)
        result = JobResult(document, progress, *self._records[document.uid].in_order(), failure)
        await self.publish(result)
        return result

    async def publish(self, result: JobResult) -> None:
        """Request the curve, fetch every agent's adapter, and copy a succeeded job's adapter to its export path."""
        document, records = result.document, (len(result.steps), len(result.evals))
        if any(records) and self._drawn.get(document.uid) != records:
            size = document.spec.rollout.group_size
            self.on_curve(CurveRequest(str(document.ref), self.folder.job(document.ref), size))
            self._drawn[document.uid] = records
        if result.progress is not None:
            for agent, version in result.progress.published.items():
                await self._adapter(result, agent, version)

    async def _adapter(self, result: JobResult, agent: str, version: int) -> None:
        document = result.document
        key = (document.uid, agent, version, result.phase)
        if version < 0 or key in self._published:
            return
        manifest = await find_manifest(self.bus, self.blobs, document, agent, version)
        if manifest is None:
            log.warning(
                "%s: version %d of agent %s has no manifest; its adapter is not written", document.ref, version, agent
            )
            return
        part = "" if len(document.spec.agents) == 1 else agent
        folder = self.folder.job(document.ref) / "adapter" / part
        pool = next((document.pool_of(one) for one in document.spec.agents if one.name == agent), document.pool)
        template = document.spec.rollout.chat_template
        await adapter.fetch(self.blobs, manifest, folder, self.pools.get(pool), template)
        if result.phase is Phase.SUCCEEDED and document.spec.export.path is not None:
            adapter.export(folder, document.spec.export.path, part)
        self._published.add(key)


def with_last_fault(folder: OutFolder, result: JobResult) -> JobResult:
    """Return a result with the text of the last fault in the job's recorded episodes, and what loading its environment left behind."""
    last, notes = "", dict.fromkeys(result.load_notes)
    with (
        contextlib.suppress(FileNotFoundError),
        (folder.job(result.document.ref) / "episodes.jsonl").open("rb") as file,
    ):
        has_faults = result.progress is not None and any(result.progress.faults.values())
        for line in file if has_faults else islice(file, _FIRST_EPISODES):  # the first one has the notes
            if b'"fault_text":' in line or b'"load_notes":' in line:
                with contextlib.suppress(ValueError):
                    episode = json.loads(line)
                    last = episode.get("fault_text") or last
                    notes |= dict.fromkeys(episode.get("load_notes", ()))
    return replace(result, last_fault=last, load_notes=tuple(notes))


def write_summary(
    folder: OutFolder,
    results: Sequence[JobResult],
    modules: Mapping[str, ModuleFile],
    data: Mapping[str, tuple[ModuleFile, ...]],
) -> None:
    """Write `summary.json`, with the files and digests of modules and data sets. Raises InvalidInput if the folder cannot be written."""
    content = summary(results)
    for result in results:
        if result.document.ref.key in modules:
            content["jobs"][str(result.document.ref)]["environment"] = modules[result.document.ref.key].model_dump()
        if files := data.get(result.document.ref.key):
            content["jobs"][str(result.document.ref)]["data"] = [file.model_dump() for file in files]
    write(folder.summary, json.dumps(content, indent=2, ensure_ascii=False).encode() + b"\n")


def read_results(folder: OutFolder, record: RunRecord) -> list[JobResult]:
    """Return the results of a finished run from its files. Raises InvalidInput if the files were damaged or removed."""
    last_progress = {progress.uid: progress for progress in record.progress}
    return [
        with_last_fault(folder, _read_result(folder.job(job.ref), job, last_progress.get(job.uid)))
        for job in record.jobs
    ]


def _read_result(folder: Path, document: JobDocument, progress: Progress | None) -> JobResult:
    try:
        steps = [read_line(StepRecord, line) for line in (folder / "steps.jsonl").read_bytes().splitlines()]
        evals = [read_line(EvalRecord, line) for line in (folder / "evals.jsonl").read_bytes().splitlines()]
    except (OSError, ValueError) as error:
        raise InvalidInput(
            f"{folder}: the records of this finished job are damaged or missing: choose another --out"
        ) from error
    return JobResult(document, progress, tuple(steps), tuple(evals))
