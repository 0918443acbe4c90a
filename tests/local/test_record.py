import json
import math
from collections.abc import AsyncIterator

import pytest

from marlaas.local.folder import hold
from marlaas.local.records import RecordFile, read_line
from marlaas_api import subjects
from marlaas_api.bus import Bus
from marlaas_api.bus_memory import MemoryServer
from marlaas_api.messages import BusMessage, EvalRecord, StepRecord
from marlaas_api.wire import encode


@pytest.fixture
async def bus() -> AsyncIterator[Bus]:
    bus = MemoryServer().connect("test")
    await bus.ensure()
    yield bus
    await bus.close()


async def _publish(bus: Bus, *records: BusMessage) -> None:
    for record in records:
        if isinstance(record, StepRecord):
            subject = subjects.step(record.namespace, record.job, record.uid, record.step)
        elif isinstance(record, EvalRecord):
            subject = subjects.evaluation(record.namespace, record.job, record.uid, record.version)
        await bus.publish(subject, encode(record))


def _lines(folder, document, name):
    return [json.loads(line) for line in (folder.job(document.ref) / name).read_text().splitlines()]


async def test_every_record_is_in_its_file_once_and_in_order(bus, tmp_path, document, step, evaluation):
    records = RecordFile(document().ref)
    await _publish(bus, step(document(), 0), evaluation(document(), 0, 0.1), step(document(), 1))
    assert await records.read(bus)
    await _publish(bus, step(document(), 2), evaluation(document(), 2, 0.5))
    assert await records.read(bus)
    assert not await records.read(bus)
    with hold(tmp_path) as folder:
        records.write(folder)
        assert [line["step"] for line in _lines(folder, document(), "steps.jsonl")] == [0, 1, 2]
        assert [line["version"] for line in _lines(folder, document(), "evals.jsonl")] == [0, 2]


async def test_a_runner_that_comes_later_writes_the_same_files_from_the_stream(bus, tmp_path, document, step):
    await _publish(bus, step(document(), 0), step(document(), 1))
    for _ in range(2):
        records = RecordFile(document().ref)
        await records.read(bus)
        with hold(tmp_path) as folder:
            records.write(folder)
    assert [line["step"] for line in _lines(folder, document(), "steps.jsonl")] == [0, 1]


async def test_a_record_without_a_mean_is_read_back_as_it_was(bus, tmp_path, document, evaluation):
    records = RecordFile(document().ref)
    records.add(evaluation(document(), 0, math.nan, ("olleh",)))
    with hold(tmp_path) as folder:
        records.write(folder)
        (line,) = (folder.job(document().ref) / "evals.jsonl").read_bytes().splitlines()
    read = read_line(EvalRecord, line)
    assert math.isnan(read.reward_mean)
    assert math.isnan(read.samples[0].reward)


async def test_records_of_an_earlier_job_of_the_same_name_are_not_ours(bus, document, step, evaluation):
    earlier = document(uid="earlier")
    await _publish(bus, step(earlier, 0), evaluation(earlier, 0, 0.5), step(document("other"), 0), step(document(), 1))
    records = RecordFile(document().ref)
    await records.read(bus)
    assert records.in_order() == ((step(document(), 1),), ())
