"""Whether the tiny model's two jobs learn: `examples/quickstart.yaml` with three seeds; also the memory of each role."""

from bench.runs import EXAMPLES, run, table


def main() -> None:
    rows, memory = [], {}
    for seed in (0, 1, 2):
        result = run(EXAMPLES / "quickstart.yaml", seed=seed)
        memory = result.pss_bytes
        for name, job in result.jobs().items():
            rows.append(
                [
                    seed,
                    name,
                    job["phase"],
                    job["evalBefore"],
                    job["evalAfter"],
                    job["policyVersion"],
                    f"{result.wall_s:.0f}",
                ]
            )
    print(table(["seed", "job", "phase", "eval before", "eval after", "version", "wall s (whole run)"], rows))
    print()
    print(
        table(
            ["role", "peak MiB (shared pages divided)"], [[role, size >> 20] for role, size in sorted(memory.items())]
        )
    )
