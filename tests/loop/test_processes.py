"""The run as a user runs it, with its processes killed one after another: nothing lost, nothing doubled, the same adapter."""

import asyncio
import hashlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml
from tests.loop.harness import Loop, document, train, weights_of
from tests.loop.test_agents import team

from marlaas.local.records import open_jobs
from marlaas_api.messages import JobDocument, StepRecord

pytestmark = pytest.mark.slow

STEPS = 10
"""Of each job."""
METRICS, AMOUNTS = ("tokens", "loss", "grad_norm"), ("trained_tokens", "zero_variance_tokens")
VICTIMS = ["sandbox", "orchestrator", "trainer", "rollout", "nats-server"]


def jobs() -> list[JobDocument]:
    """The job of `harness.document`, and a team of two agents that speak at the same time."""
    return [document(steps=STEPS), team("teams:once", steps=STEPS)]


@pytest.fixture
def manifest(tiny_model: Path, tmp_path: Path) -> Path:
    """The jobs, as a tenant would write them."""
    engine = {"engine": "reference", "dtype": "float32", "maxModelLen": 256}
    pool = {"model": {"path": str(tiny_model)}, "adapterSlots": 16, "maxRank": 8, "rollout": engine}
    head = {"apiVersion": "marlaas.dev/v1alpha1"}
    objects = [head | {"kind": "ModelPool", "metadata": {"name": "tiny"}, "spec": pool}]
    for job in jobs():
        spec = job.spec.model_dump(mode="json", by_alias=True, exclude_defaults=True)
        metadata = {"name": job.job, "namespace": job.namespace}
        objects.append(head | {"kind": "RLJob", "metadata": metadata, "spec": spec})
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump_all(objects))
    return path


def processes(runner: int, name: str) -> list[psutil.Process]:
    """The process of a role, or the server, among the runner's children."""
    found = []
    for child in psutil.Process(runner).children(recursive=True):
        try:
            line = child.cmdline()
        except psutil.Error:
            continue
        role = (
            line[line.index("marlaas_worker") + 1] if "marlaas_worker" in line else Path(line[0]).name if line else ""
        )
        if role == name:
            found.append(child)
    return found


def levels(process: "subprocess.Popen[str]") -> Iterator[dict[str, Any]]:
    for line in process.stdout:
        level = json.loads(line)
        if level["type"] == "progress":
            yield level


def kill_all(process: "subprocess.Popen[str]") -> None:
    """Kill the processes of one role after another, each when both jobs have finished another step."""
    victims, seen, steps = list(VICTIMS), -1, dict.fromkeys((job.job for job in jobs()), -1)
    for level in levels(process):
        if level["phase"] == "Running":
            steps[level["job"].rpartition("/")[2]] = int(level.get("step", -1))
        if min(steps.values()) > seen and victims:
            seen = min(steps.values())
            for one in processes(process.pid, victims.pop(0)):
                one.send_signal(signal.SIGKILL)
    assert not victims


def test_killed_one_after_another_the_run_ends_with_exact_accounting_and_the_same_adapters(
    tiny_model, manifest, tmp_path, monkeypatch
):
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=os.pathsep)
    out = tmp_path / "out"
    command = [sys.executable, "-m", "marlaas", "run", str(manifest), "--out", str(out), "--seed", "7", "--json"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"}
    ) as process:
        kill_all(process)
    assert process.returncode == 0
    progress = {one.document.job: one.progress for one in open_jobs(out)}
    for job, (weights, steps) in asyncio.run(undisturbed(tiny_model, tmp_path / "undisturbed")).items():
        folder = out / "team-a" / job
        records = [json.loads(line) for line in (folder / "steps.jsonl").read_text().splitlines()]
        assert [record["step"] for record in records] == list(range(STEPS))
        assert [record["version"] for record in records] == sorted(record["version"] for record in records)
        indices = [index for record in records for index in record["indices"]]
        assert sorted(indices) == list(range(len(indices))), "every task once"
        used = [one for record in records for one in record["usage"].values()]
        assert progress[job] is not None
        assert progress[job].amounts.trained_tokens == sum(one["trained_tokens"] for one in used) > 0
        expected = [step.model_dump(mode="json") for step in steps]
        assert figures(records) == figures(expected), "the first step that differs"
        assert adapters(folder, weights) == weights


def figures(records: list[dict[str, Any]]) -> list[dict[str, object]]:
    """The fields of each step that no kill may change: its groups, rewards and metrics, and the usage of each agent."""
    return [
        {
            "indices": record["indices"],
            "reward_mean": record["reward_mean"],
            **{name: value for name, value in record["metrics"].items() if name.rpartition("/")[2] in METRICS},
            **{name: [used.get(amount, 0) for amount in AMOUNTS] for name, used in record["usage"].items()},
        }
        for record in records
    ]


def adapters(folder: Path, agents: Collection[str]) -> dict[str, str]:
    """The sha256 of each agent's weights in a job's folder."""
    paths = {name: folder / "adapter" / ("" if len(agents) == 1 else name) for name in agents}
    return {
        name: hashlib.sha256((path / "adapter_model.safetensors").read_bytes()).hexdigest()
        for name, path in paths.items()
    }


async def undisturbed(tiny_model: Path, folder: Path) -> dict[str, tuple[dict[str, str], list[StepRecord]]]:
    """By job, the last version's weights of each agent and the records, in one process to which nothing happens."""
    async with Loop(tiny_model, folder) as loop:
        steps = {job.job: await train(loop, job) for job in jobs()}
        weights = {job.job: await weights_of(loop, job) for job in jobs()}
    return {
        name: ({agent: versions[-1] for agent, versions in weights[name].items()}, found)
        for name, (_, found) in steps.items()
    }
