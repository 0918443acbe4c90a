"""From the commit of a policy version to its first token, in a finished run of `bench multitenant`.

Raw events: the manifests in the run's blob store, whose time is taken just before the commit; the events `VersionVerified` on
its bus, written when an engine has proven the version; and the recorded turns. Counted are versions from 1 on that were used.

commit to proof: until a rollout replica may serve the version.
commit to first token: until the first token of the earliest turn of the version. The tokens of a turn are taken to be spread
evenly over its time in the engine. An episode may ask late: a strict job's next tasks are issued after the commit, and
their environments begin then; an asynchronous job's episodes under way keep their version.
request to first token: the same, from the arrival of that turn's request, if that is later than the commit.
"""

import asyncio
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from bench.multitenant_figures import Events, percentile
from bench.multitenant_workload import Mode, name_of
from bench.runs import table
from marlaas.episodes.record import TurnRecord
from marlaas.local.credentials import LocalIssuer
from marlaas.local.folder import OutFolder
from marlaas_api import subjects
from marlaas_api.bus_nats import connect
from marlaas_api.bus_users import BusKeys, RunnerUser, server_config
from marlaas_api.messages import JobEvent, Manifest
from marlaas_api.nats_server import EmbeddedNats
from marlaas_api.wire import decode_as

HEADERS = ["mode", "versions", *(f"{what}, s: p50 / p99" for what in ("commit to proof", "commit to first token"))]
HEADERS += ["request to first token, s: p50 / p99"]
_VERIFIED = re.compile(r"version (\d+) of agent (\S+) is verified and served")


@dataclass(frozen=True, slots=True)
class Version:
    """Unix times of a version. job: as `<namespace>/<name>`. proven_at: None if no event tells it."""

    job: str
    number: int
    committed_at: float
    proven_at: float | None


@dataclass(frozen=True, slots=True)
class Delivery:
    """Seconds of a version that was used; see the module. proof_s: None if unknown."""

    proof_s: float | None
    token_s: float
    request_s: float


def versions_of(folder: Path) -> list[Version]:
    """Return the versions of a finished run of jobs with one agent; kept in its folder as `versions.json`."""
    path = folder / "versions.json"
    if not path.exists():
        proven = asyncio.run(_proven(OutFolder(folder / "run")))
        committed = _committed(OutFolder(folder / "run"))
        found = [[*version, at, proven.get(version)] for version, at in committed.items()]
        path.write_text(json.dumps(found))
    return [Version(*one) for one in json.loads(path.read_text())]


def _committed(folder: OutFolder) -> dict[tuple[str, int], float]:
    """Return when each version was committed, by job and number; of a commit that was tried again the last time."""
    manifests = [decode_as(Manifest, path.read_bytes()) for path in folder.blobs.glob("*/*/*/*/v*/*-manifest")]
    return dict(sorted(((f"{one.namespace}/{one.job}", one.version), one.at) for one in manifests))


async def _proven(folder: OutFolder) -> dict[tuple[str, int], float]:
    """Read the run's bus: start a server on its store."""
    keys = BusKeys.make()
    server = EmbeddedNats(folder.nats_store, log_path=folder.logs / "nats.log", extra_config=server_config(keys))
    with closing(LocalIssuer(keys)) as issuer:
        async with server:
            bus = await connect(server.url, name="bench", creds=issuer.of(RunnerUser()).path)
            try:
                stored = await bus.replay(subjects.EVENTS, subjects.event("*", "*", "rollout"))
            finally:
                await bus.close()
    return proofs(decode_as(JobEvent, one.data) for one in stored)


def proofs(events: Iterable[JobEvent]) -> dict[tuple[str, int], float]:
    """Return when each version was first proven, by job and number."""
    found: dict[tuple[str, int], float] = {}
    for event in events:
        if event.reason == "VersionVerified" and (match := _VERIFIED.search(event.message)):
            key = f"{event.namespace}/{event.job}", int(match[1])
            found[key] = min(event.at, found.get(key, event.at))
    return found


def deliveries(versions: Sequence[Version], events: Events) -> list[Delivery]:
    """Return the deliveries of the versions that turns used."""
    firsts = {name: _first_turns(turns) for name, turns in _turns_by_job(events).items()}
    found = []
    for one in versions:
        turn = firsts.get(one.job, {}).get(one.number)
        if one.number and turn is not None:
            token_at, asked_at = first_token_at(turn), turn.at - turn.engine_s - turn.queue_s
            proof_s = None if one.proven_at is None else one.proven_at - one.committed_at
            found.append(Delivery(proof_s, token_at - one.committed_at, token_at - max(one.committed_at, asked_at)))
    return found


def _turns_by_job(events: Events) -> dict[str, list[TurnRecord]]:
    return {name: [turn for episode in job.episodes for turn in episode.turns] for name, job in events.jobs.items()}


def _first_turns(turns: Iterable[TurnRecord]) -> dict[int, TurnRecord]:
    """Return the turn with the earliest first token of each version."""
    found: dict[int, TurnRecord] = {}
    for turn in turns:
        if turn.output_ids and (
            turn.version not in found or first_token_at(turn) < first_token_at(found[turn.version])
        ):
            found[turn.version] = turn
    return found


def first_token_at(turn: TurnRecord) -> float:
    """Return the unix time of a turn's first token, if its tokens were spread evenly."""
    return turn.at - turn.engine_s * (1 - 1 / len(turn.output_ids))


def report(found: Mapping[Mode, Sequence[Delivery]]) -> str:
    """Return the table. found: by mode, the deliveries of all rounds."""
    rows = [
        [
            name_of(mode),
            len(all_of),
            _percentiles([one.proof_s for one in all_of if one.proof_s is not None]),
            _percentiles([one.token_s for one in all_of]),
            _percentiles([one.request_s for one in all_of]),
        ]
        for mode, all_of in found.items()
    ]
    return table(HEADERS, rows)


def _percentiles(seconds: Sequence[float]) -> str:
    return " / ".join(f"{percentile(seconds, share):.2f}" for share in (0.5, 0.99)) if seconds else ""
