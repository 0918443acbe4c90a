"""Raw events as a run writes them, for the tests of figures."""

import json
from pathlib import Path

from marlaas.episodes.record import EpisodeRecord, TurnRecord
from marlaas_api.messages import StopReason
from marlaas_api.names import Split

BEGIN = 1000.0


def turn(end: float, engine_s: float, queue_s: float = 0.0, tokens: int = 2, version: int = 0) -> TurnRecord:
    """A turn with a prompt of three tokens. end: seconds after BEGIN."""
    return TurnRecord(
        agent="policy",
        turn=0,
        version=version,
        append="x",
        text="y",
        stop_reason=StopReason.STOP,
        prompt_ids=(1,) * 3,
        num_prompt_tokens=3,
        output_ids=(1,) * tokens,
        engine_s=engine_s,
        queue_s=queue_s,
        at=BEGIN + end,
    )


def write_job(folder: Path, name: str, steps: list[float], plays: list[tuple[TurnRecord, ...]]) -> None:
    job = folder / "run" / name
    job.mkdir(parents=True)
    (job / "steps.jsonl").write_text("".join(json.dumps({"at": BEGIN + at}) + "\n" for at in steps))
    (job / "evals.jsonl").write_text(json.dumps({"reward_mean": 0.5}) + "\n")
    episodes = [
        EpisodeRecord(
            episode=f"e{number}",
            group=f"g{number}",
            split=Split.TRAIN,
            index=number,
            member=0,
            at=turns[-1].at,
            turns=turns,
        )
        for number, turns in enumerate(plays)
    ]
    (job / "episodes.jsonl").write_text("".join(f"{one.model_dump_json(exclude_defaults=True)}\n" for one in episodes))
