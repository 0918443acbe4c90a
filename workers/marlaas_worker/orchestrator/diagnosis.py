"""Warnings about a job's numbers, each a sentence with what to do, and the reasons for which a job fails. No I/O and no clock.

A warning never stops a job. It says that the numbers of the job may not mean what they seem to mean.

A job fails if an environment does not fit it, it has too many faults, or all trainers have given it up. Faults count as a share of the
latest episodes, so that a short outage long ago does not fail the job.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from marlaas_api.last_words import visible
from marlaas_api.messages import Episode, EvalRecord, JobDocument, ReplicaReport, StepPlays, StepRecord, agents_on
from marlaas_api.reasons import Reason

MAX_CUT, MAX_FLAT = 0.3, 0.8
"""Warn if a larger share than MAX_CUT of a step's replies was cut, or if a larger share than MAX_FLAT of its groups has equal rewards."""
MIN_ESS, MAX_GAP = 0.9, 0.1
"""Warn if the effective sample size, as a share of the tokens, is below MIN_ESS.

Warn also if the mean |log(trainer / engine)| of the tokens' probabilities is above MAX_GAP, in nats, in a step without staleness.
"""
FEWEST_GROUPS = 4
"""Fewest groups of a step for warnings about their rewards and prompts: in fewer groups, equal ones may be chance."""
RETURN_S = 120.0
"""Seconds for which a trainer without a report is expected back.

A rolling update of a pool replaces its trainers one after the other, and each of them loads its model.
"""


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


@dataclass(slots=True)
class GivenUp:
    """Decides whether all trainers of a pool have given up an agent of the job. Keeps the time of each trainer's last report, by pool and name."""

    _seen_at: dict[tuple[str, str], float] = field(default_factory=dict)

    def words(self, document: JobDocument, reports: Iterable[ReplicaReport], now: float) -> str | None:
        """Return one trainer's reason if every trainer of a pool has given up the same agent of the job; None otherwise.

        Trainers whose report is missing for less than RETURN_S count as trainers that have not given up. now: seconds of any clock.
        """
        trainers = [report for report in reports if report.role == "trainer" and report.pool in document.pools]
        self._seen_at |= {(report.pool, report.replica): now for report in trainers}
        for pool in sorted(document.pools):
            for agent in agents_on(pool, document):
                said = {one.replica: one.broken.get(agent.fault_key) for one in trainers if one.pool == pool}
                if words := self._of(pool, said, now):
                    return words
        return None

    def _of(self, pool: str, said: Mapping[str, str | None], now: float) -> str | None:
        """Return one reason if all trainers of a pool have given up an agent. said: by trainer, its reason; None: it has not given up."""
        mine = ((name, at) for (where, name), at in self._seen_at.items() if where == pool)
        is_awaited = any(name not in said and now - at < RETURN_S for name, at in mine)
        return None if is_awaited or not all(said.values()) else next(iter(said.values()), None)


class FaultWatch:
    """Decides whether a job fails because too many of its latest episodes ended in faults.

    Args:
        window: number of the latest episodes that count.
        at_least: number of episodes before which the job does not fail.
        max_share: largest share of faults with which the job goes on.
        has_scored: whether an episode of the job was scored earlier.

    Attributes:
        permanent: text of a fault that every play of the job would have; empty if there was none before the first scored episode. Once
            the environment has worked, the job does not fail because one sandbox cannot load it: such faults count for the share.
    """

    def __init__(self, window: int, max_share: float, at_least: int, *, has_scored: bool = False) -> None:
        self.permanent = ""
        self._has_scored = has_scored
        self._recent: dict[tuple[str, int], bool] = {}
        self._window = window
        self._max_share = max_share
        self._at_least = at_least
        self._last_text = ""

    def add(self, episode: Episode) -> None:
        """Add an episode to the window; another one of the same member within the window changes nothing."""
        member = (episode.group, episode.member)
        if member in self._recent:
            return
        self._recent[member] = episode.fault is not None
        if len(self._recent) > self._window:
            del self._recent[next(iter(self._recent))]
        self._has_scored |= episode.fault is None
        if episode.is_permanent and not self._has_scored:
            self.permanent = visible(episode.fault_text)
        if episode.fault is not None:
            self._last_text = f"{episode.fault.value}: {visible(episode.fault_text)}"

    def verdict(self) -> str | None:
        """Return why the job must fail, with the last fault's text; None while the share is within the limit or too few episodes are known."""
        if len(self._recent) < self._at_least:
            return None
        share = sum(self._recent.values()) / len(self._recent)
        if share <= self._max_share:
            return None
        return (
            f"{share:.0%} of the last {len(self._recent)} episodes were lost to faults; the last one: {self._last_text}"
        )
