"""How much of the time does the engine have work? Strict against maxStaleness 1, one job against four, with tools that take 300 ms."""

import copy
from typing import Any

from bench.runs import documents, run, table


def manifest(num_jobs: int, staleness: int) -> list[dict[str, Any]]:
    """The quickstart's calculator, slowed down, so many times."""
    found = documents("quickstart.yaml")
    pool = next(one for one in found if one["kind"] == "ModelPool")
    pool["spec"]["adapterSlots"] = num_jobs * (staleness + 2)
    job = next(one for one in found if one["kind"] == "RLJob" and one["spec"]["environment"]["name"] == "calculator")
    job["spec"]["environment"].setdefault("args", {})["tool_latency_s"] = 0.3
    job["spec"]["training"] |= {"steps": 8, "maxStaleness": staleness}
    job["spec"]["evaluation"] = {"tasks": 0}
    jobs = []
    for number in range(num_jobs):
        one = copy.deepcopy(job)
        one["metadata"]["name"] = f"calculator-{number}"
        jobs.append(one)
    return [pool, *jobs]


def main() -> None:
    rows = []
    for num_jobs in (1, 4):
        for staleness in (0, 1):
            result = run(manifest(num_jobs, staleness))
            steps = [record for records in result.records.values() for record in records]
            train_s = max(record["at"] for record in steps) - min(record["at"] - record["wall_s"] for record in steps)
            engine = [one for one in result.replicas if one["role"] == "rollout"]
            busy = sum(one["busy_s"] for one in engine) / train_s
            rows.append([num_jobs, staleness, f"{busy:.0%}", f"{len(steps) / train_s:.2f}", f"{train_s:.0f}"])
    print(table(["jobs", "maxStaleness", "engine batch not empty", "steps/s, all jobs", "training s"], rows))


if __name__ == "__main__":
    main()
