"""Warnings about a step or an evaluation: numbers in its record that are out of bounds, each in a sentence with what to do. Pure.

A warning never stops a job. It says that the numbers of the job may not mean what they seem to mean.
"""

from collections.abc import Iterator

from marlaas_api.messages import EvalRecord, JobDocument, StepPlays, StepRecord
from marlaas_api.reasons import Reason

MAX_CUT, MAX_FLAT = 0.3, 0.8
"""Warn if a larger share than MAX_CUT of a step's replies was cut, or if a larger share than MAX_FLAT of its groups has equal rewards."""
MIN_ESS, MAX_GAP = 0.9, 0.1
"""Warn if the effective sample size, as a share of the tokens, is below MIN_ESS.

Warn also if the mean |log(trainer / engine)| of the tokens' probabilities is above MAX_GAP, in nats, in a step without staleness.
"""
FEWEST_GROUPS = 4
"""Fewest groups of a step for warnings about their rewards and prompts: in fewer groups, equal ones may be chance."""


def warnings(document: JobDocument, step: StepRecord | None, evaluation: EvalRecord | None) -> dict[str, str]:
    """Return the warnings: by `Reason`, a sentence for each number that is out of bounds.

    Args:
        step: the record of the last step; None before the first.
        evaluation: the record of the newest evaluated version; None before the first.
    """
    found: dict[str, str] = dict(_of_evaluation(evaluation)) if evaluation is not None else {}
    return found | (dict(_of_step(document, step)) if step is not None else {})


def _of_evaluation(record: EvalRecord) -> Iterator[tuple[str, str]]:
    if record.num_overlapping:
        yield (
            Reason.EVALUATION_OVERLAP,
            f"{record.num_overlapping} of {record.num_prompts} held-out tasks of the evaluation after step {record.step} were trained on: "
            "draw the content of a task with task.draw or task.row, which hold one in eight out",
        )


def _of_time(document: JobDocument, plays: StepPlays) -> str:
    if not plays.num_overtime:
        return ""
    limit = f"turnTimeoutSeconds ({document.spec.turn_timeout_s:g})"
    return f", {plays.num_overtime / plays.num_turns:.0%} of all at {limit}"


def _of_step(document: JobDocument, step: StepRecord) -> Iterator[tuple[str, str]]:
    plays, at = step.plays, f"step {step.step}"
    if plays.num_turns and plays.num_cut / plays.num_turns > MAX_CUT:
        yield (
            Reason.REPLIES_CUT,
            f"{plays.num_cut / plays.num_turns:.0%} of the replies of {at} were cut at rollout.maxTokens ({document.spec.rollout.max_tokens}) or the pool's "
            f"maxModelLen{_of_time(document, plays)}, and what they would have said is not scored: raise the limit, or ask for shorter replies",
        )
    if len(step.indices) >= FEWEST_GROUPS and step.num_zero_variance / len(step.indices) > MAX_FLAT:
        yield (
            Reason.NO_SIGNAL,
            f"{step.num_zero_variance} of {len(step.indices)} groups of {at} have equal rewards and train nothing: choose tasks that the policy sometimes "
            "solves, a finer reward, or training.data.skip",
        )
    if plays.num_mixed and len(document.spec.agents) == 1:
        yield (
            Reason.MIXED_GROUPS,
            f"{plays.num_mixed} groups of {at} have members with different first prompts, so their rewards do not compare: draw all content from task.rng, "
            "task.draw or task.row",
        )
    if plays.num_prompts == 1 and len(step.indices) >= FEWEST_GROUPS and document.spec.training.data.tasks != 1:
        yield (
            Reason.ONE_PROMPT,
            f"all {len(step.indices)} tasks of {at} begin with the same prompt, and draw no content with task.draw or task.row: if it should differ, a generator "
            "that was made at import repeats; if the tasks differ in what they hide, draw it, so that an evaluation can hold it out",
        )
    yield from _of_engine(step, at)


def _of_engine(step: StepRecord, at: str) -> Iterator[tuple[str, str]]:
    ess = [value for name, value in step.metrics.items() if name.rpartition("/")[2] == "ess" and value]
    gaps = [value for name, value in step.metrics.items() if name.rpartition("/")[2] == "logprob_gap"]
    low_ess = ess and min(ess) < MIN_ESS
    if low_ess or (gaps and max(gaps) > MAX_GAP and step.staleness_max == 0):
        yield (
            Reason.ENGINE_MISMATCH,
            f"{at}: engine and trainer differ by {max(gaps, default=0.0):.3f} nats a token, effective sample size {min(ess, default=1.0):.2f}: lower "
            "training.maxStaleness or the learning rate; if it stays at maxStaleness 0, the engine's arithmetic differs from the trainer's (docs/reference/models.md)",
        )
