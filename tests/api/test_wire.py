import math

import ormsgpack
import pytest
from tests.tables import rows

from marlaas_api import messages, wire
from marlaas_api.blobs_memory import MemoryBlobs
from marlaas_api.errors import UnsupportedSchema
from marlaas_api.messages import BusMessage, Episode, GenerateRequest, JobVerdict, Pin, TaskMessage
from marlaas_api.names import Split
from marlaas_api.wire import BadMessage, decode, decode_as, encode, pack, unpack

PLACE = {"namespace": "team-a", "job": "sums", "uid": "u", "group": "u-t0"}
TASK = TaskMessage(**PLACE, split=Split.TRAIN, index=0, seed=7, group_size=2)
EPISODE = Episode(**PLACE, split=Split.TRAIN, index=0, member=1, episode="u-t0-1-1")
OF_TURN = {"agent": "policy", "member": 1, "episode": "u-t0-1-1", "turn": 0, "parent": None}
REQUEST = GenerateRequest(**PLACE, **OF_TURN, append="1 + 1", deadline_s=5.0)


def envelope(**fields: object) -> bytes:
    return ormsgpack.packb({"v": wire.SCHEMA_VERSION, "t": "Pin", "d": {"version": 3}} | fields)


def below(kind: type[BusMessage]) -> set[type[BusMessage]]:
    return {kind}.union(*(below(child) for child in kind.__subclasses__()))


def test_a_message_comes_back_as_it_was():
    for message in (TASK, EPISODE.model_copy(update={"rewards": {"policy": 0.1}, "leaves": {"policy": (0, 2)}})):
        assert decode(encode(message)) == message
        assert decode_as(type(message), encode(message)) == message


def test_every_kind_of_message_can_be_read():
    ours = {kind for kind in below(BusMessage) if kind.__module__.startswith(messages.__name__)}
    known = {value for value in vars(messages).values() if isinstance(value, type)}
    assert len(ours) > 20
    assert ours <= known, "imported by marlaas_api.messages: `decode` knows no other"


NO_MESSAGES = [(ormsgpack.packb(body), words) for body, words in rows(__file__, "no_messages")]
NO_MESSAGES += [(data, "not a MARLaaS message") for data in (b"", b"\x91" * 5000)]


@pytest.mark.parametrize(("data", "words"), NO_MESSAGES)
async def test_bytes_that_are_no_message_are_refused_with_one_error_whatever_is_wrong(data, words):
    with pytest.raises(BadMessage, match=words):
        decode(data)
    with pytest.raises(BadMessage):
        decode_as(Pin, data)
    with pytest.raises(BadMessage):
        await unpack(data, MemoryBlobs())


def test_a_field_of_a_newer_release_is_ignored():
    data = envelope(d={"version": 3, "more": 1})
    assert decode(data) == decode_as(Pin, data) == Pin(version=3)


def test_a_stranger_cannot_fill_the_log_with_what_is_refused():
    for data in (envelope(t="x" * 100_000), envelope(d={f"field{n}": n for n in range(10_000)})):
        for read in (decode, lambda data: decode_as(JobVerdict, data)):
            with pytest.raises(BadMessage) as error:
                read(data)
            assert len(str(error.value)) < 700


def test_another_kind_than_the_one_expected_is_refused_before_it_is_read():
    for data in (encode(TASK), envelope(t="TaskMessage", d="anything")):
        with pytest.raises(BadMessage, match="expected Episode, found 'TaskMessage'"):
            decode_as(Episode, data)


def test_a_newer_schema_is_refused_whatever_it_holds():
    for data in (envelope(v=wire.SCHEMA_VERSION + 1), ormsgpack.packb({"v": wire.SCHEMA_VERSION + 1, "x": 1})):
        for read in (decode, lambda data: decode_as(Pin, data)):
            with pytest.raises(UnsupportedSchema, match=r"schema version 2; this worker reads 1 to 1: upgrade it"):
                read(data)


@pytest.mark.parametrize("deadline_s", [math.nan, math.inf])
def test_a_deadline_that_no_clock_reaches_is_refused(deadline_s):
    assert decode(encode(REQUEST)) == REQUEST
    with pytest.raises(BadMessage, match="deadline_s"):
        decode(encode(REQUEST.model_copy(update={"deadline_s": deadline_s})))


@pytest.mark.parametrize(
    ("message", "fields"),
    [(REQUEST, ("member", "turn", "parent", "max_tokens")), (EPISODE, ("index", "member", "num_turns"))],
)
def test_a_number_that_cannot_be_sent_on_is_refused(message, fields):
    """A number of 30 digits, which msgpack can only hold as text."""
    for field in fields:
        body = {**message.model_dump(mode="json"), field: "9" * 30}
        with pytest.raises(BadMessage, match=field):
            decode(envelope(t=type(message).__name__, d=body))


async def test_a_message_beyond_the_limit_travels_as_a_claim_of_its_job():
    blobs, large = MemoryBlobs(), EPISODE.model_copy(update={"fault_text": "x" * 5000})
    assert await pack(EPISODE, blobs, 1000) == encode(EPISODE)
    data = await pack(large, blobs, 1000)
    assert len(data) < 1000
    assert list(blobs.contents) == await blobs.list("team-a/sums/u/claims")
    assert await unpack(data, blobs) == large
    assert await unpack(encode(EPISODE), blobs) == EPISODE


async def test_a_claim_is_followed_only_where_it_is_asked_for_and_a_broken_one_is_refused():
    blobs = MemoryBlobs()
    claim = await pack(EPISODE, blobs, 1)
    with pytest.raises(BadMessage, match="unknown message type 'Claim'"):
        decode(claim)
    with pytest.raises(BadMessage, match="expected Episode, found 'Claim'"):
        decode_as(Episode, claim)
    for broken in ({"name": "x"}, None, {"name": 1, "sha256": "", "size_bytes": 0}):
        with pytest.raises(BadMessage, match="BlobRef"):
            await unpack(ormsgpack.packb({"v": 1, "t": "Claim", "d": broken}), blobs)
