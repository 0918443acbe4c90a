"""Two agents that both speak in every episode, against two jobs with the same tasks: `python -m bench agents --only digests`.

Strict, deterministic engine (`reference`), builtin model tiny; all three jobs in one run. In a job of its own, an agent has the
same team, in which the other one is frozen and silent. The digests of the adapters of all versions must be equal bit for bit.
"""

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bench.runs import changed, finished, kept, run, table
from bench.sources import ROOT, python_path
from marlaas.local.folder import OutFolder
from marlaas_api.messages import Manifest
from marlaas_api.wire import decode_as

AGENTS, STEPS, TENSORS = ("solver", "verifier"), 4, "adapter_model.safetensors"
HEADERS = ["seed", "agent", "versions", "last digest in the team", "in a job of its own", "bit for bit"]
Digests = Mapping[str, Mapping[str, list[str]]]
"""By job and agent: the digest of each version's adapter, from version 0 on."""


def manifests(steps: int) -> list[dict[str, Any]]:
    """Return the pool and three jobs: `team`, and one for each agent, with the agent's name."""
    pool, example = changed("agents/relay.yaml", steps, None)
    pool["spec"]["adapterSlots"] = 16
    pool["spec"]["rollout"] |= {"engine": "reference", "dtype": "float32", "maxModelLen": 256}
    return [pool, *(_job(example, speaker) for speaker in ("", *AGENTS))]


def _job(example: dict[str, Any], speaker: str) -> dict[str, Any]:
    """Return a job in which one agent speaks and is trained, or (speaker empty) both."""
    job = copy.deepcopy(example)
    spec = job["spec"]
    job["metadata"] = {"name": speaker or "team", "namespace": "team-a"}
    adapter = {"rank": 8, "alpha": 16}
    spec["agents"] = [{"name": name, "adapter": adapter, "trainable": speaker in ("", name)} for name in AGENTS]
    alone = {"name": "team_env:Alone", "args": {"speaker": speaker}}
    spec["environment"] = alone if speaker else {"name": "team_env:at_once"}
    spec["rollout"] = {"groupSize": 4, "maxTokens": 16, "maxTurns": 8}
    spec["training"] |= {"groupsPerStep": 2, "maxStaleness": 0, "maxRefill": 0}
    spec["evaluation"] = {"tasks": 0}
    return job


def measure(seeds: list[int], steps: int | None, folder: Path) -> None:
    """Run the jobs with each seed, and print the table. steps: None for STEPS."""
    rows = []
    for seed in seeds:
        rows += rows_of(seed, train(manifests(steps or STEPS), seed, folder))
    print("\n" + table(HEADERS, rows) + "\n")


def train(wanted: list[dict[str, Any]], seed: int, folder: Path) -> Digests:
    """Return the digests of a run of the jobs."""

    def new() -> dict[str, Any]:
        result = finished(run(wanted, seed=seed, env={"PYTHONPATH": python_path(ROOT, ROOT / "bench")}))
        return {"digests": digests_of(result.folder)}

    return dict(kept(folder / f"digests-{seed}.json", wanted, new)["digests"])


def digests_of(out: Path) -> dict[str, dict[str, list[str]]]:
    """Return the digests of a finished run's adapters."""
    found: dict[str, dict[str, dict[int, str]]] = {}
    for path in OutFolder(out).blobs.glob("*/*/*/*/v*/*-manifest"):
        one = decode_as(Manifest, path.read_bytes())
        found.setdefault(one.job, {}).setdefault(one.agent, {})[one.version] = one.files[TENSORS].sha256
    return {
        job: {agent: [digest for _, digest in sorted(versions.items())] for agent, versions in agents.items()}
        for job, agents in found.items()
    }


def rows_of(seed: int, digests: Digests) -> list[list[Any]]:
    """Return a row for each agent. An agent that was never changed proves nothing."""
    rows = []
    for agent in AGENTS:
        team, own = digests["team"][agent], digests[agent][agent]
        told = "same" if team == own else "different"
        told = "never changed" if len({*team}) < 2 else told
        rows.append([seed, agent, f"0 to {len(team) - 1}", team[-1][:16], own[-1][:16], told])
    return rows
