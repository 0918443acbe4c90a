"""The run as a user runs it, with its processes killed one after another: nothing lost, nothing doubled, the same adapter."""

import asyncio
import hashlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml
from tests.loop.harness import Loop, document, train

from marlaas.local.records import open_jobs
from marlaas_api.messages import StepRecord

pytestmark = pytest.mark.slow

STEPS = 20
VICTIMS = ["sandbox", "orchestrator", "trainer", "rollout", "nats-server"]


@pytest.fixture
def manifest(tiny_model: Path, tmp_path: Path) -> Path:
    """The job of `harness.document`, as a tenant would write it."""
    job = document(steps=STEPS)
    engine = {"engine": "reference", "dtype": "float32", "maxModelLen": 256}
    pool = {"model": {"path": str(tiny_model)}, "adapterSlots": 16, "maxRank": 8, "rollout": engine}
    head = {"apiVersion": "marlaas.dev/v1alpha1"}
    spec = job.spec.model_dump(mode="json", by_alias=True, exclude_defaults=True)
    objects = [
        head | {"kind": "ModelPool", "metadata": {"name": "tiny"}, "spec": pool},
        head | {"kind": "RLJob", "metadata": {"name": job.job, "namespace": job.namespace}, "spec": spec},
    ]
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


def levels(process: "subprocess.Popen[str]") -> Iterator[dict[str, object]]:
    for line in process.stdout:
        level = json.loads(line)
        if level["type"] == "progress":
            yield level


def test_killed_one_after_another_the_run_ends_with_exact_accounting_and_the_same_adapter(
    tiny_model, manifest, tmp_path
):
    out = tmp_path / "out"
    command = [sys.executable, "-m", "marlaas", "run", str(manifest), "--out", str(out), "--seed", "7", "--json"]
    victims = list(VICTIMS)
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"}
    ) as process:
        seen = -1
        for level in levels(process):
            step = int(str(level.get("step", -1)))
            if level["phase"] == "Running" and step > seen and victims:
                seen = step
                for one in processes(process.pid, victims.pop(0)):
                    one.send_signal(signal.SIGKILL)
    assert process.returncode == 0
    assert not victims
    folder = out / "team-a" / "reverse"
    records = [json.loads(line) for line in (folder / "steps.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records] == list(range(STEPS))
    assert [record["version"] for record in records] == sorted(record["version"] for record in records)
    indices = [index for record in records for index in record["indices"]]
    assert sorted(indices) == list(range(len(indices))), "every task once"
    (opened,) = open_jobs(out)
    assert opened.progress is not None
    total = opened.progress.amounts
    assert total.trained_tokens == sum(record["usage"]["policy"]["trained_tokens"] for record in records) > 0
    weights, steps = asyncio.run(undisturbed(tiny_model, tmp_path / "undisturbed"))
    assert figures(records) == figures([step.model_dump(mode="json") for step in steps]), "the first step that differs"
    assert hashlib.sha256((folder / "adapter" / "adapter_model.safetensors").read_bytes()).hexdigest() == weights


def figures(records: list[dict[str, Any]]) -> list[tuple[object, ...]]:
    """What a step was made of and what came of it, to the last bit."""
    return [
        (
            record["indices"],
            record["reward_mean"],
            *(record["metrics"][name] for name in ("tokens", "loss", "grad_norm")),
            *(record["usage"]["policy"].get(name, 0) for name in ("trained_tokens", "zero_variance_tokens")),
        )
        for record in records
    ]


async def undisturbed(tiny_model: Path, folder: Path) -> tuple[str, list[StepRecord]]:
    """The last version's weights of the same job and its records, in one process to which nothing happens."""
    async with Loop(tiny_model, folder) as loop:
        weights, steps = await train(loop, document(steps=STEPS))
        return weights[-1], steps
