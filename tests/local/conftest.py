import pytest
from tests.harness import a_progress, identity, job_document
from tests.local.runs import placed

from marlaas_api.blobs_memory import MemoryBlobs
from marlaas_api.bus_memory import MemoryServer
from marlaas_api.messages import EvalRecord, EvalSample


@pytest.fixture
def server():
    return MemoryServer()


@pytest.fixture
async def bus(server):
    bus = server.connect("test")
    await bus.ensure()
    yield bus
    await bus.close()


@pytest.fixture
def blobs():
    return MemoryBlobs()


@pytest.fixture
def document():
    """A job of three steps on pool `tiny`; `spec` overrides parts of its spec, by camelCase name."""

    def build(name="reverse", spec=None, **fields: object):
        return job_document(name, spec={"training": {"steps": 3}, **(spec or {})}, **fields)

    return build


@pytest.fixture
def progress_of():
    return lambda document, **fields: a_progress(document, **{"generation": document.generation, **fields})


@pytest.fixture
def evaluation():
    def build(document, version, mean, replies=()):
        samples = tuple(
            EvalSample(index=i, prompt=f"p{i}", reply=reply, reward=mean) for i, reply in enumerate(replies)
        )
        body = {"step": version, "version": version, "at": 1.0, "reward_mean": mean, "num_episodes": 64}
        return EvalRecord(**identity(document), **body, samples=samples)

    return build


@pytest.fixture
def place(tmp_path):
    with placed(tmp_path) as here:
        yield here
