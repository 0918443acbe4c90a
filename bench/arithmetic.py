"""Whether a real LLM learns: `examples/arithmetic.yaml`, SmolLM2-135M-Instruct on arithmetic of reasoning-gym."""

from bench.runs import EXAMPLES, run, table


def main() -> None:
    result = run(EXAMPLES / "arithmetic.yaml")
    rows = [
        [name, job["phase"], job["evalBefore"], job["evalAfter"], job["steps"], f"{result.wall_s:.0f}"]
        for name, job in result.jobs().items()
    ]
    print(table(["job", "phase", "eval before", "eval after", "steps", "wall s (whole run)"], rows))
    for name, records in result.records.items():
        print(f"\n{name}")
        keys = ["step", "version", "reward_mean", "staleness_mean", "wall_s"]
        lines = [
            [f"{record[key]:.3g}" for key in keys] + [f"{record['metrics'].get('logprob_gap', float('nan')):.2g}"]
            for record in records
        ]
        print(table([*keys, "logprob gap"], lines))
    print(
        table(
            ["role", "peak MiB (shared pages divided)"],
            [[role, size >> 20] for role, size in sorted(result.pss_bytes.items())],
        )
    )
