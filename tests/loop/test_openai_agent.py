"""An agent behind the OpenAI door trains, and what it trains on is what the same agent leaves when it is written with the SDK."""

from pathlib import Path

import pytest
from tests.loop.harness import Loop, document, train

from marlaas_api.bus import Request
from marlaas_api.messages import GroupReady, JobDocument, Turn
from marlaas_api.wire import decode

pytestmark = pytest.mark.slow


async def trained(model: Path, folder: Path, job: JobDocument):
    """Weights of every version, every turn as recorded, and every trajectory with what it earned."""
    turns, groups = [], []

    async def hear(request: Request) -> None:
        """As it is published: what is on record is purged."""
        (turns if request.subject.startswith("turn.") else groups).append(decode(request.data))

    async with Loop(model, folder) as loop, loop.bus.listen("turn.>", hear), loop.bus.listen("group.>", hear):
        weights, steps = await train(loop, job)
    recorded = {(turn.episode, turn.turn): _trained_of(turn) for turn in turns if isinstance(turn, Turn)}
    earned = [(group.group, group.trajectories) for group in groups if isinstance(group, GroupReady)]
    return weights, [step.reward_mean for step in steps], recorded, sorted(earned)


def _trained_of(turn: Turn) -> dict[str, object]:
    """All but what a turn cost and when it was."""
    return turn.model_dump(exclude={"meter", "at", "replica"})


async def test_an_openai_agent_trains_on_the_very_trajectories_of_its_native_twin(tiny_model, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    native = await trained(tiny_model, tmp_path / "native", document(environment="twins:native"))
    chat = await trained(tiny_model, tmp_path / "chat", document(environment="twins:chat"))
    weights, _, turns, trajectories = native
    assert chat == native
    assert len(set(weights)) == 3, "every step changed something"
    assert {turn["parent"] for turn in turns.values()} >= {None, 0, 1}, "conversations went on, in both branches"
    assert len(trajectories) == 4
