"""Blobs on S3: the whole contract of a blob store, under a prefix of a bucket that another installation shares, and what only S3 can do wrong."""

from collections.abc import Iterator

import pytest
from bench.s3_server import Bucket, serving
from tests.api import test_blobs_contract as contract
from tests.tables import rows

from marlaas_api.blobs import BlobRefused, Blobs, BlobUnavailable
from marlaas_api.blobs_store import open_blobs

globals().update({name: test for name, test in vars(contract).items() if name.startswith("test_")})
THEIRS = "other/team-a/0123456789abcdef-x"
LARGE = bytes(range(256)) * 90_000
"""23 MB, an adapter of an 8B model: sent in parts."""


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[Bucket]:
    with serving() as bucket:
        for name, value in bucket.variables.items():
            monkeypatch.setenv(name, value)
        bucket.objects[THEIRS] = b"theirs"
        yield bucket
        assert bucket.objects[THEIRS] == b"theirs"


@pytest.fixture
def blobs(bucket: Bucket) -> Blobs:
    return open_blobs("s3://bucket/marlaas")


async def test_an_adapter_of_a_large_model_is_sent_in_parts_and_is_there_whole(blobs, bucket):
    ref = await blobs.put("team-a/job", "adapter.safetensors", LARGE)
    assert len(bucket.parts) == 1
    assert bucket.objects[f"marlaas/{ref.name}"] == LARGE
    assert await blobs.get(ref) == LARGE


async def test_a_server_that_is_busy_for_a_moment_is_asked_again(blobs, bucket):
    bucket.busy = 2
    ref = await blobs.put("team-a", "x", b"1")
    assert await blobs.get(ref) == b"1"
    assert bucket.asked["PUT"] == 3


async def test_a_key_that_the_server_does_not_know_is_refused_for_good(bucket, monkeypatch):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "another")
    with pytest.raises(BlobRefused, match=r"s3://bucket/marlaas refuses .*: grant this process read and write there"):
        await open_blobs("s3://bucket/marlaas").put("team-a", "x", b"1")
    assert bucket.asked["PUT"] == 1


@pytest.mark.parametrize(("status", "code", "kind"), rows(__file__, "s3_answers"))
async def test_every_answer_but_wrong_bytes_is_one_to_wait_for(blobs, bucket, status, code, kind):
    ref = await blobs.put("team-a", "x", b"1")
    bucket.refusal = status, code
    for call in (blobs.put("team-a", "y", b"2"), blobs.get(ref)):
        with pytest.raises(BlobUnavailable) as caught:
            await call
        assert type(caught.value).__name__ == kind, caught.value
