"""What `bench` reads of a run's processes and of its NATS server."""

import json
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest
from bench.changed_run import changes_of, monitored
from bench.usage import UsageRecorder, streams_in, streams_of

from marlaas.local import server
from marlaas.local.credentials import LocalIssuer
from marlaas_api.bus_nats import connect
from marlaas_api.bus_users import BusKeys, RunnerUser
from marlaas_api.nats_server import EmbeddedNats

STATE = {"messages": 2, "bytes": 249, "first_seq": 1, "last_seq": 3, "num_subjects": 2, "consumer_count": 1}
ANSWER = {"account_details": [{"name": "a"}, {"name": "b", "stream_detail": [{"name": "KV_jobs", "state": STATE}]}]}


def test_streams_of_all_accounts_are_counted():
    assert streams_in(ANSWER) == {"KV_jobs": {"messages": 2, "bytes": 249, "subjects": 2, "consumers": 1}}
    assert streams_in({}) == {}


async def test_a_monitored_server_tells_its_streams(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(server, "server_config", server.server_config)  # restored after the test
    monitored()
    keys = BusKeys.make()
    with closing(LocalIssuer(keys)) as issuer:
        async with EmbeddedNats(tmp_path, extra_config=server.server_config(keys)) as nats:
            bus = await connect(nats.url, name="test", creds=issuer.of(RunnerUser()).path)
            await bus.ensure()
            await (await bus.bucket("jobs")).put("team-a.one", b"1")
            await bus.close()
            found = streams_of(tmp_path)
    assert found["KV_jobs"] | {"bytes": 0} == {"messages": 1, "bytes": 0, "subjects": 1, "consumers": 0}


def test_a_server_without_monitoring_tells_nothing(tmp_path: Path):
    assert streams_of(tmp_path) == {}
    (tmp_path / "nats-server_1.ports").write_text(json.dumps({"nats": ["nats://127.0.0.1:1"]}))
    assert streams_of(tmp_path) == {}


@pytest.mark.parametrize(
    ("words", "role"), [(("marlaas_worker", "trainer"), "trainer"), (("-m", "marlaas.local.curves"), "curves")]
)
def test_processes_are_counted_by_role(tmp_path: Path, words: tuple[str, ...], role: str):
    """A runner with one child that looks like a role, and a grandchild of the same role."""
    child = "import subprocess, sys; subprocess.run(['cat'])"
    script = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}, *{words!r}])"
    with subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE) as runner:
        recorder = UsageRecorder(runner.pid, tmp_path / "usage.jsonl", tmp_path)
        while role not in (sample := recorder._sample(with_memory=True))["cpu_s"]:
            pass
        assert runner.stdin is not None
        runner.stdin.close()
    assert sample["cpu_s"].keys() == {"runner", role}
    assert all(sample[what][role] > 0 for what in ("pss_bytes", "files", "threads"))
    assert "streams" not in sample


def test_only_the_process_that_a_change_concerns_is_changed():
    names = ["lockstep", "first-come", "monitored"]
    assert [[one.__name__ for one in changes_of([role], names)] for role in ("run", "orchestrator", "rollout")] == [
        ["monitored"],
        ["barrier"],
        ["first_come"],
    ]
    assert changes_of(["trainer"], names) == changes_of(["run"], ["lockstep"]) == changes_of(["rollout"], [""]) == []
