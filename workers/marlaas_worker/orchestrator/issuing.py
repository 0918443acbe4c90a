"""Publishes the tasks of one job, pins the versions that their groups are sampled from, and decides when the job issues no tasks.

A preempted job stops at a step boundary: it begins no step and no evaluation, and has a limited time for its groups in
flight. Of groups that are not complete by then, the members that have not ended are played again after the next admission,
under the same pins. `metering` counts the plays that were cut, at the preemption and when their group is decided, and the job
is not charged for them.
"""

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass

from marlaas_api.failpoints import failpoint
from marlaas_api.messages import Episode, JobAgent, ReplicaReport
from marlaas_worker.orchestrator.evaluation import EvaluationRun
from marlaas_worker.orchestrator.experience import CompleteGroup
from marlaas_worker.orchestrator.job_state import JobState
from marlaas_worker.orchestrator.job_tasks import past_players
from marlaas_worker.orchestrator.records import Records

DRAIN_S = 30.0
"""Longest time that a preempted job has for its groups in flight."""


@dataclass(slots=True)
class IssueHolds:
    """Reasons for which an admitted job issues no tasks, as texts; each is empty while it does not apply.

    Attributes:
        over_quota: the job's tenant is over the quota of a rate.
        preempted: the job is preempted.
        preempted_at: when the last preemption began or was cancelled, unix seconds; 0 before the first.
    """

    over_quota: str = ""
    preempted: str = ""
    preempted_at: float = 0.0

    def preempt(self, why: str, now: float) -> bool:
        """Set why the job is preempted; if `why` is empty, the job goes on. Return whether this starts or ends a preemption."""
        changed = bool(why) != bool(self.preempted)
        if changed:
            self.preempted_at = now
        self.preempted = why
        return changed

    @property
    def any(self) -> str:
        """The first reason; empty if there is none."""
        return self.over_quota or self.preempted

    def may_issue(self, state: JobState) -> bool:
        """Return whether the job may issue groups. A preempted strict job still completes the step that it has begun."""
        return not self.over_quota and (not self.preempted or (state.strict and state.is_mid_step))

    def may_stop(self, state: JobState | None, now: float) -> bool:
        """Return whether the job is preempted, and has drained or has had DRAIN_S to do so.

        state: None while the job's records are not read; then it is not known whether the job has drained.
        """
        if not self.preempted:
            return False
        return (state is not None and state.is_drained) or now - self.preempted_at >= DRAIN_S


class TaskIssuer:
    """Publishes the tasks of one job, and pins the versions that their groups are sampled from.

    reports: returns the latest reports of all replicas.
    """

    def __init__(self, records: Records, reports: Callable[[], Iterable[ReplicaReport]]) -> None:
        self._records, self._reports = records, reports

    async def reissue(self, state: JobState, queued: Container[str]) -> None:
        """Requeue unfinished tasks that are missing from the queue.

        queued: names of the groups whose tasks are in the queue. If one were queued again, it would be played twice under one name.
        """
        if not state.has_policies:
            return
        await self.publish(state, sorted(state.groups.in_flight - set(state.groups.complete)), queued)
        if state.evaluation is not None:
            await self.publish_evaluation(state, state.evaluation, queued)

    async def publish_evaluation(self, state: JobState, run: EvaluationRun, queued: Container[str] = ()) -> None:
        """Pin and publish the tasks of an evaluation that have not ended.

        Args:
            queued: names of the groups that are in the queue already. Their tasks are not published again.
        """
        for task in state.tasks.missing(run):
            await self._pin(task.group, run.versions)
            # Held-out tasks are played with the newest version, so that their rewards do not depend on a draw.
            players = past_players(state.document)
            await self._pin(task.group, {agent.name: run.versions[agent.policy_name] for agent in players})
            if task.group not in queued:
                await self._records.publish_task(task)

    async def publish(self, state: JobState, indices: Sequence[int], queued: Container[str] = ()) -> None:
        """Pin and publish training tasks.

        Args:
            indices: indices of the tasks' groups.
            queued: names of the groups that are in the queue already. Their tasks are not published again.
        """
        # If no replica serves a fresh version, the first turn must load one. The pin makes it the newest; a replica would pin one that it knows.
        is_pinned = state.strict or not self._is_served(state)
        for index in indices:
            task = state.tasks.train(index)
            is_sampled = not state.document.spec.demonstrates(task.group)
            if is_pinned and is_sampled:
                await self._pin(task.group, state.issued_versions)
            if is_sampled:
                await self._pin(task.group, state.tasks.past.versions)
            if task.group not in queued:
                await self._records.publish_task(task, state.ended(task.group))
            failpoint("orchestrator.issue.after_task")

    async def sampled_from(self, state: JobState, group: CompleteGroup) -> dict[str, int]:
        """Return, by agent, the version from which a group's turns were sampled: the one to which the group is pinned.

        For an agent without a pin, and for all agents if the group is a demonstration, return the agent's committed version.
        """
        if state.document.spec.demonstrates(group.name):
            return state.versions
        pins = {agent: await self._records.pin(agent, group.name) for agent in state.policies}
        return {agent: state.versions[agent] if pin is None else pin for agent, pin in pins.items()}

    async def oldest(self, state: JobState, index: int) -> dict[str, int]:
        """Return, by agent, the oldest version from which a turn of a group in flight is, or can still be, sampled.

        A replica pins a group that has no pin yet to the newest version that it serves. If that is more than maxStaleness versions old, the
        replica waits for a newer one, so such a version is not counted.
        """
        bound, group = state.document.spec.training.max_staleness, state.tasks.train(index).group
        served, at = self.served(state), state.assembly.next_versions
        pins = {agent: await self._records.pin(agent, group) for agent in state.policies}
        return {agent: max(served[agent], at[agent] - bound) if pin is None else pin for agent, pin in pins.items()}

    def served(self, state: JobState) -> dict[str, int]:
        """Return, by agent, the lowest of the newest versions that the replicas serve; the committed one if no replica serves any.

        A replica that serves no version of the agent within maxStaleness of the committed one is ignored.
        """
        reports, found = list(self._reports()), dict(state.versions)
        bound = state.document.spec.training.max_staleness
        for one in (JobAgent(state.document, agent) for agent in state.document.spec.policies):
            newest = state.versions[one.agent.name]
            names = {version: one.adapter(version).engine_name for version in range(max(0, newest - bound), newest + 1)}
            on_replicas = [
                [version for version, name in names.items() if name in report.verified] for report in reports
            ]
            found[one.agent.name] = min((max(versions) for versions in on_replicas if versions), default=newest)
        return found

    async def restore_pins(self, state: JobState) -> None:
        """Recreate expired pins of groups that are partly played.

        The other members of such a group must be sampled from the same version, however long the job was suspended.
        """
        spec, groups = state.document.spec, [state.tasks.train(index).group for index in state.groups.in_flight]
        open_groups = {group for group in groups if not spec.demonstrates(group)}
        pinned_as = {agent.name: agent.pinned_as for agent in state.document.spec.agents}
        played: dict[tuple[str, str], list[tuple[str, Episode]]] = {}
        for episode in state.undecided():
            for agent, leaves in episode.leaves.items():
                if leaves and episode.group in open_groups:
                    played.setdefault((pinned_as[agent], episode.group), []).append((agent, episode))
        for key, parts in played.items():
            await self._records.restore_pin(*key, parts)

    async def _pin(self, group: str, versions: Mapping[str, int]) -> None:
        for agent, version in versions.items():
            await self._records.create_pin(agent, group, version)

    def _is_served(self, state: JobState) -> bool:
        """Return whether some replica serves, of each agent, a version that is fresh enough for the last group in flight."""
        reports, needed = list(self._reports()), state.assembly.needed_versions(len(state.groups.in_flight) - 1)
        for one in (JobAgent(state.document, agent) for agent in state.document.spec.policies):
            newest = state.versions[one.agent.name]
            oldest = min(newest, max(0, needed[one.agent.name]))
            names = {one.adapter(version).engine_name for version in range(oldest, newest + 1)}
            if not any(names & set(report.verified) for report in reports):
                return False
        return True
