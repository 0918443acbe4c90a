"""A job whose easy and hopeless tasks rest: the same tasks in the same order whenever the orchestrator dies."""

import pytest
from tests.killing import kill_at
from tests.orchestrator.harness import ADMITTED, SEAMS, OrchestratorHarness, run_to_end

from marlaas_api.messages import Difficulty, Phase, StepRecord, TaskMessage
from marlaas_api.names import Split

DATA = {"tasks": 6, "order": "shuffled", "skip": {"passes": 2, "maxShare": 0.6}}


class Player:
    """Tasks 0 and 1 are solved, 2 is hopeless, the others teach; notes which task each group played."""

    def __init__(self) -> None:
        self.played: dict[str, tuple[int, int]] = {}

    def __call__(self, task: TaskMessage, member: int) -> float:
        if task.split is Split.TRAIN:
            self.played[task.group] = (task.index, task.seed)
        if task.index in (0, 1):
            return 1.0
        return 0.0 if task.index == 2 else float(member == 0)


async def play(harness, job):
    player = Player()
    level = await run_to_end(harness, job, player)
    assert level.phase is Phase.SUCCEEDED
    return player.played, await harness.steps(job), level


def said(steps: list[StepRecord]) -> list[tuple[object, ...]]:
    return [(s.outcome, s.version, s.indices, s.skipped_solved, s.skipped_hopeless, s.outcomes) for s in steps]


async def test_tasks_come_again_with_the_same_seed_in_groups_of_their_own_and_rest_when_they_teach_nothing(
    harness, document
):
    played, steps, level = await play(harness, document(steps=12, data=DATA))
    seeds = dict(played.values())
    assert len(seeds) == 6, "all tasks were played, each with one seed"
    assert len(played) > len(set(played.values())), "and some more than once"
    counts = [sum(index == task for index, _ in played.values()) for task in range(6)]
    assert max(counts[:3]) < min(counts[3:]), "what taught nothing was played less"
    assert level.skipped_solved == sum(step.skipped_solved for step in steps) > 0
    assert level.skipped_hopeless == sum(step.skipped_hopeless for step in steps) > 0
    given_out = sorted(index for step in steps for index in step.indices)
    assert len(given_out) + level.skipped_solved + level.skipped_hopeless == given_out[-1] + 1, "gaps are skips"
    told = {(one.index, one.difficulty) for step in steps for one in step.outcomes}
    easy = {(0, Difficulty.SOLVED), (1, Difficulty.SOLVED), (2, Difficulty.HOPELESS)}
    assert told == easy | {(task, Difficulty.VARIED) for task in (3, 4, 5)}


@pytest.mark.parametrize(
    ("seam", "passes"), [(ADMITTED, 1), *((seam, n) for seam in SEAMS if seam != ADMITTED for n in (1, 3, 7))]
)
async def test_killed_between_any_two_effects_it_plays_the_same_tasks_in_the_same_order(
    harness, document, tmp_path, seam, passes
):
    job = document(steps=8, data=DATA)
    other = OrchestratorHarness(tmp_path / "other")
    await other.bus.ensure()
    undisturbed = await play(other, job)
    kill_at(seam, passes)
    played, steps, level = await play(harness, job)
    assert harness.deaths == [seam]
    assert played == undisturbed[0]
    assert said(steps) == said(undisturbed[1])
    skipped = [(one.skipped_solved, one.skipped_hopeless) for one in (level, undisturbed[2])]
    assert skipped[0] == skipped[1]


@pytest.mark.parametrize("seam", [seam for seam in SEAMS if seam != ADMITTED])
async def test_killed_while_sampling_runs_ahead_no_group_is_doubled_and_no_skip_is_lost(harness, document, seam):
    job = document(steps=8, maxStaleness=2, data=DATA)
    kill_at(seam, *range(3, 1000, 4))
    played, steps, level = await play(harness, job)
    assert harness.deaths
    indices = [index for step in steps for index in step.indices]
    assert len(indices) == len(set(indices))
    skipped = level.skipped_solved + level.skipped_hopeless
    issued = {int(group.rpartition("t")[2]) for group in played}
    assert len(issued) + skipped == max(issued) + 1, "gaps are skips"
    assert 0 < sum(step.skipped_solved + step.skipped_hopeless for step in steps) <= skipped
