"""`python -m marlaas.cluster.records`: writes a job's records of steps and evaluations, one a line, to standard output.

`marlaas.Cluster` runs it in the orchestrator's pod, which can reach the bus.
"""

import argparse
import asyncio
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from marlaas.local.records import RecordFile, read_line
from marlaas_api.bus import Bus
from marlaas_api.bus_nats import connect
from marlaas_api.errors import MarlaasError
from marlaas_api.messages import EvalRecord, StepRecord
from marlaas_api.names import JobRef

MODULE = "marlaas.cluster.records"
Record = StepRecord | EvalRecord


async def written(bus: Bus, ref: JobRef, step: int, version: int) -> str:
    """Return the records of a job after a step and after an evaluated version, a line each."""
    records = RecordFile(ref)
    await records.read(bus)
    steps, evals = records.in_order()
    fresh = [f"step {one.model_dump_json()}\n" for one in steps if one.step > step]
    return "".join([*fresh, *(f"eval {one.model_dump_json()}\n" for one in evals if one.version > version)])


def parsed(output: bytes) -> Iterator[Record]:
    """Yield the record of each line."""
    for line in output.splitlines():
        kind, _, record = line.partition(b" ")
        yield read_line(StepRecord, record) if kind == b"step" else read_line(EvalRecord, record)


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the records and return 0; on an error, return 1 with the reason on stderr."""
    parser = argparse.ArgumentParser(prog=f"python -m {MODULE}")
    for flag in ("--nats", "--namespace", "--job", "--uid"):
        parser.add_argument(flag, required=True)
    parser.add_argument("--creds", type=Path)
    for flag in ("--step", "--version"):
        parser.add_argument(flag, type=int, default=-1)
    try:
        sys.stdout.write(asyncio.run(_read(parser.parse_args(arguments))))
    except MarlaasError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0


async def _read(options: argparse.Namespace) -> str:
    bus = await connect(options.nats, name="marlaas-records", creds=options.creds)
    try:
        ref = JobRef(options.namespace, options.job, options.uid)
        return await written(bus, ref, options.step, options.version)
    finally:
        await bus.close()


if __name__ == "__main__":
    sys.exit(main())
