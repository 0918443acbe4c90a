"""The run as a user runs it, with its processes killed one after another: nothing lost, nothing doubled, the same adapter."""

import asyncio
import contextlib
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
from tests.loop.test_pools import two

from marlaas.local.records import open_jobs
from marlaas_api.messages import JobDocument, Manifest, StepRecord
from marlaas_api.wire import decode_as

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

STEPS = 10
"""Of each job."""
METRICS, AMOUNTS = ("tokens", "loss", "grad_norm"), ("trained_tokens", "zero_variance_tokens")
TRAINERS = {"tiny": 2, "other": 1}
"""By pool. `tiny` has the agent of the first job and one of the team's; `other`, with another base model, the team's second agent."""


def jobs() -> list[JobDocument]:
    """The job of `harness.document`, and a team of two agents on two pools that speak at the same time."""
    return [document(steps=STEPS), two("other", "teams:once", steps=STEPS)]


@pytest.fixture
def models(tiny_model: Path, other_model: Path) -> dict[str, Path]:
    """The base models by pool."""
    return {"tiny": tiny_model, "other": other_model}


@pytest.fixture
def manifest(models: dict[str, Path], tmp_path: Path) -> Path:
    """The jobs, as a tenant would write them."""
    head = {"apiVersion": "marlaas.dev/v1alpha1"}
    settings = {
        "adapterSlots": 16,
        "maxRank": 8,
        "rollout": {"engine": "reference", "dtype": "float32", "maxModelLen": 256},
    }
    objects = []
    for name, model in models.items():
        pool = settings | {"model": {"path": str(model)}, "trainer": {"replicas": TRAINERS[name]}}
        objects.append(head | {"kind": "ModelPool", "metadata": {"name": name}, "spec": pool})
    for job in jobs():
        spec = job.spec.model_dump(mode="json", by_alias=True, exclude_defaults=True)
        metadata = {"name": job.job, "namespace": job.namespace}
        objects.append(head | {"kind": "RLJob", "metadata": metadata, "spec": spec})
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump_all(objects))
    return path


def processes(runner: int, name: str) -> list[psutil.Process]:
    """The processes of a role, of one replica (`trainer-0.tiny`), or of a program, among the runner's children."""
    found = []
    for child in psutil.Process(runner).children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if name in names_of(child.cmdline()):
                found.append(child)
    return found


def names_of(line: list[str]) -> list[str]:
    """The names of a process: a role's and the one of its folder, which is the replica's, or the program's."""
    if "marlaas_worker" not in line:
        return [Path(one).name for one in line[:1]]
    folder = line[line.index("--scratch") + 1] if "--scratch" in line else ""
    return [line[line.index("marlaas_worker") + 1], Path(folder).name]


def newest(out: Path, job: str, agent: str) -> tuple[int, str]:
    """An agent's newest version, and the trainer that committed it; -1 and empty before the first one."""
    found = (out / ".state" / "blobs" / "team-a" / job).glob(f"*/{agent}/*/*-manifest")
    manifests = [decode_as(Manifest, path.read_bytes()) for path in found]
    return max(((one.version, one.trainer) for one in manifests), default=(-1, ""))


def victims(out: Path) -> Iterator[list[str]]:
    """Yield the names of processes that are killed together, for one kill after another.

    The fourth kill hits the trainer of one of the team's agents, and the last one all processes of a pool. While one trainer of
    `tiny` has the agents of both jobs, an empty list is yielded: its death would concern two agents. It may have both until
    the other job has ended.
    """
    yield ["sandbox"]
    yield ["orchestrator"]
    yield ["nats-server"]
    while (trainer := newest(out, "team", "solver")[1]) == newest(out, "reverse", "policy")[1]:
        if newest(out, "reverse", "policy")[0] == STEPS:
            break
        yield []
    yield [f"{trainer}.tiny"]
    yield ["rollout-0.other", "trainer-0.other"]


def levels(process: "subprocess.Popen[str]") -> Iterator[dict[str, Any]]:
    for line in process.stdout:
        level = json.loads(line)
        if level["type"] == "progress":
            yield level


def kill_all(process: "subprocess.Popen[str]", out: Path) -> None:
    """Kill one victim after another, each when the team, whose agents all of them concern, has finished another step."""
    left, seen = victims(out), -1
    for level in levels(process):
        step = int(level.get("step", -1))
        if level["job"] == "team-a/team" and level["phase"] == "Running" and step > seen:
            seen = step
            for name in next(left, []):
                kill(process.pid, name)
    assert next(left, None) is None, "the team has ended before the last kill"


def kill(runner: int, name: str) -> None:
    killed = processes(runner, name)
    assert killed, f"{name} does not run"
    for one in killed:
        with contextlib.suppress(psutil.NoSuchProcess):  # sandboxes end with the process that forked them
            one.send_signal(signal.SIGKILL)


def test_killed_one_after_another_the_run_ends_with_exact_accounting_and_the_same_adapters(
    models, manifest, tmp_path, monkeypatch
):
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=os.pathsep)
    out = tmp_path / "out"
    command = [sys.executable, "-m", "marlaas", "run", str(manifest), "--out", str(out), "--seed", "7", "--json"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"}
    ) as process:
        kill_all(process, out)
    assert process.returncode == 0
    progress = {one.document.job: one.progress for one in open_jobs(out)}
    for job, (weights, steps) in asyncio.run(undisturbed(models, tmp_path / "undisturbed")).items():
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


async def undisturbed(models: dict[str, Path], folder: Path) -> dict[str, tuple[dict[str, str], list[StepRecord]]]:
    """By job, the last version's weights of each agent and the records, in one process to which nothing happens."""
    async with Loop(models["tiny"], folder, also={"other": models["other"]}) as loop:
        steps = {job.job: await train(loop, job) for job in jobs()}
        weights = {job.job: await weights_of(loop, job) for job in jobs()}
    return {
        name: ({agent: versions[-1] for agent, versions in weights[name].items()}, found)
        for name, (_, found) in steps.items()
    }
