"""The spec of a job in its document; `marlaas_api.kinds` documents the meaning of the fields."""

import sys
from typing import Annotated, Literal, get_args

from pydantic import AfterValidator, Field, StringConstraints

from marlaas_api.messages.agent_settings import (
    AgentSettings,
    AgentTrainingSettings,
    NameRef,
    SftSettings,
)
from marlaas_api.messages.base import SpecPart
from marlaas_api.messages.packed import PackedArgs
from marlaas_api.messages.training_settings import ReferenceSettings, TrainingSettings
from marlaas_api.names import MAX_TURNS_FACTOR, eval_index, export_folder, group_token, hub_repository
from marlaas_api.numeric import QUANTITY, TRAINED_COPIES

QuantityText = Annotated[str, StringConstraints(pattern=QUANTITY)]


LEAST_TURN_S, MAX_TURN_S = 120.0, 86400.0
SECONDS_PER_TOKEN = 0.5
"""Of a turn without a timeout of its own. Engines that generate less than two tokens per second for a request are overloaded."""


class EgressRule(SpecPart):
    """A network destination that a pod of the job may reach."""

    cidr: str
    ports: tuple[int, ...] = ()


class ClaimRef(SpecPart):
    """A PersistentVolumeClaim, by name."""

    claim_name: str


class VolumeSettings(SpecPart):
    """Files of the environment: a ConfigMap or a claim."""

    name: str
    config_map: NameRef | None = None
    pvc: ClaimRef | None = None


class EnvironmentSettings(SpecPart):
    """The environment, its limits, and its pods.

    The operator creates and repairs the pods of a job that no longer parses from this.
    """

    name: str | None = None
    image: str | None = None
    image_pull_secrets: tuple[NameRef, ...] = ()
    entrypoint: tuple[Annotated[str, AfterValidator(sys.intern)], ...] = ()
    args: PackedArgs = PackedArgs({})
    replicas: int = 1
    concurrency: int = 64
    episode_timeout_seconds: float = 300.0
    turn_timeout_seconds: float | None = None
    memory: QuantityText = "512Mi"
    cpu: QuantityText | None = None
    max_attempts: int = 3
    max_fault_share: float = 0.5
    egress: tuple[EgressRule, ...] = ()
    secret_refs: tuple[NameRef, ...] = ()
    volumes: tuple[VolumeSettings, ...] = ()


class ChatTemplateSettings(SpecPart):  # type: ignore[no-redef]  # the plugin's __init__ has **kwargs, too
    """A job's chat template: a file or a name; neither: the pool's."""

    file: str | None = None
    name: Literal["chatml", "hermes"] | None = None
    kwargs: PackedArgs = PackedArgs({})

    def over(self, pool: "PoolChatTemplateSettings") -> "PoolChatTemplateSettings":
        """Return a job's settings where the pool has some of its own."""
        own = PoolChatTemplateSettings(file=self.file, name=self.name) if self.file or self.name else pool
        return own.model_copy(update={"kwargs": PackedArgs({**pool.kwargs.value, **self.kwargs.value})})


class PoolChatTemplateSettings(ChatTemplateSettings):  # type: ignore[no-redef]
    """A pool's chat template: of the three sources at most one; none: the model's own."""

    text: str | None = None


class SamplingSettings(SpecPart):
    """Sampling and the size of groups (`rollout`)."""

    group_size: int = 8
    max_turns: int = 8
    max_tokens: int = 256
    temperature: float = 1.0
    refresh: Literal["group", "turn"] = "group"
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    chat_template: ChatTemplateSettings = ChatTemplateSettings()


class SuiteEnvironmentSettings(SpecPart):
    """The environment of a suite."""

    name: str
    args: PackedArgs = PackedArgs({})


class SuiteSettings(SpecPart):
    """One suite of an evaluation. None: as in training."""

    name: str
    environment: SuiteEnvironmentSettings | None = None
    tasks: int = 64
    samples: int = 1
    temperature: float | None = None
    max_tokens: int | None = None
    solved_reward: float = 0.5


class EvaluationSettings(SpecPart):
    """Held-out tasks and the choice of the promoted version.

    An evaluation numbers the tasks of all suites one after another; each suite has the first held-out tasks.
    """

    every: int = 10
    tasks: int = 64
    promote: Literal["last", "best"] = "last"
    suites: tuple[SuiteSettings, ...] = ()
    suite: str | None = None

    @property
    def plan(self) -> tuple[SuiteSettings, ...]:
        """The suites of an evaluation: those that are given, or one of `tasks` tasks; empty if there is no evaluation."""
        if self.suites:
            return self.suites
        return (SuiteSettings(name="", tasks=self.tasks),) if self.tasks else ()

    @property
    def main(self) -> str:
        """Name of the suite whose reward is the job's."""
        return self.suite or next((suite.name for suite in self.plan), "")

    @property
    def num_tasks(self) -> int:
        """Number of tasks of all suites."""
        return sum(suite.tasks for suite in self.plan)

    @property
    def num_episodes(self) -> int:
        """Number of episodes of an evaluation."""
        return sum(suite.tasks * suite.samples for suite in self.plan)

    def at(self, index: int) -> tuple[SuiteSettings, int]:
        """Return the suite of an evaluation's task, and the index of the held-out task. Raises ValueError if there is none."""
        left = index
        for suite in self.plan:
            if 0 <= left < suite.tasks:
                return suite, left
            left -= suite.tasks
        raise ValueError(f"an evaluation has {self.num_tasks} tasks, and none of index {index}")


class CheckpointSettings(SpecPart):
    """Number of older versions whose files are kept."""

    keep: int = 2


class SecretKey(SpecPart):
    """One key of a Secret in the job's namespace."""

    name: str
    key: str


class WebhookSettings(SpecPart):
    """A webhook; the Secret has its URL."""

    secret_ref: SecretKey


class NotifySettings(SpecPart):
    """A receiver of messages about the job."""

    webhook: WebhookSettings
    when: tuple[Literal["end", "failure", "wait"], ...] = ("end", "failure", "wait")
    wait_seconds: float = 1800.0


class HubExportSettings(SpecPart):
    """A model repository of the hub."""

    repo: str
    private: bool = True
    token_secret_ref: SecretKey | None = None


class BucketExportSettings(SpecPart):
    """A prefix of a bucket."""

    url: str
    secret_ref: NameRef | None = None


class VolumeExportSettings(SpecPart):
    """A folder of a claim; with `marlaas run` an absolute path."""

    claim_name: str
    path: str


Upload = Literal["hub", "s3", "volume"]
"""Where adapters are uploaded: the key of `export`."""


class ExportSettings(SpecPart):
    """Destinations of the adapter, the metrics and messages; only `marlaas run` reads `path`."""

    path: str | None = None
    hub: HubExportSettings | None = None
    s3: BucketExportSettings | None = None
    volume: VolumeExportSettings | None = None
    trackers: tuple[Literal["tensorboard", "wandb", "mlflow", "trackio"], ...] = ()
    secret_refs: tuple[NameRef, ...] = ()
    egress: tuple[EgressRule, ...] = ()
    notify: tuple[NotifySettings, ...] = ()

    @property
    def remote_trackers(self) -> tuple[Literal["wandb", "mlflow", "trackio"], ...]:
        """The trackers that a cluster serves: those that are servers. The others write files."""
        return tuple(name for name in self.trackers if name != "tensorboard")

    @property
    def is_reported(self) -> bool:
        """Whether a cluster reports the job to trackers or webhooks, or uploads its adapters."""
        return bool(self.remote_trackers or self.notify or self.remote_uploads)

    @property
    def remote_uploads(self) -> tuple[Upload, ...]:
        """Where a cluster uploads the adapters: to what needs no Secret, or names one."""
        may = {
            "hub": self.hub is not None and self.hub.token_secret_ref is not None,
            "s3": self.s3 is not None and self.s3.secret_ref is not None,
            "volume": self.volume is not None,
        }
        return tuple(name for name in get_args(Upload) if may[name])


class JobSpec(SpecPart):
    """The part of an RLJob's spec that the roles, the operator's sandboxes and `marlaas run` need."""

    pool_ref: NameRef
    agents: Annotated[tuple[AgentSettings, ...], Field(min_length=1)] = (AgentSettings(name="policy"),)
    environment: EnvironmentSettings
    rollout: SamplingSettings = SamplingSettings()
    training: TrainingSettings
    evaluation: EvaluationSettings = EvaluationSettings()
    checkpoint: CheckpointSettings = CheckpointSettings()
    export: ExportSettings = ExportSettings()
    adapter_retention: Literal["keep", "delete"] = "keep"
    priority: int = 0
    suspend: bool = False
    active_deadline_seconds: float | None = None

    @property
    def policies(self) -> tuple[AgentSettings, ...]:
        """The agents that have a policy of their own."""
        return tuple(agent for agent in self.agents if agent.policy is None)

    @property
    def uploads(self) -> dict[Upload, dict[str, str]]:
        """Repository, URL or folder of each trained agent's adapter by the agent's name, for each of the places that `export` names."""
        export, trained = self.export, [one.name for one in self.policies if one.trainable]
        found: dict[Upload, dict[str, str]] = {}
        if export.hub is not None:
            found["hub"] = {name: hub_repository(export.hub.repo, name, len(trained)) for name in trained}
        if export.s3 is not None:
            found["s3"] = {name: export_folder(export.s3.url, name, len(trained)) for name in trained}
        if export.volume is not None:
            found["volume"] = {name: export_folder(export.volume.path, name, len(trained)) for name in trained}
        return found

    @property
    def teacher(self) -> str | None:
        """Name of the frozen agent that scores the tokens of the others (`distill`); None without one."""
        return None if self.training.distillation is None else self.training.distillation.teacher

    @property
    def called_agents(self) -> tuple[str, ...]:
        """Names of the agents that environments call: all but the teacher."""
        return tuple(agent.name for agent in self.agents if agent.name != self.teacher)

    @property
    def turn_timeout_s(self) -> float:
        """Longest generation of a turn, of training or of any suite; then the engine ends it, and the reply counts as cut."""
        most = max((self.rollout.max_tokens, *(suite.max_tokens or 0 for suite in self.evaluation.suites)))
        derived = max(LEAST_TURN_S, SECONDS_PER_TOKEN * most)
        return self.environment.turn_timeout_seconds or min(derived, MAX_TURN_S)

    def sampling(self, group: str) -> SamplingSettings:
        """Return the sampling of a group's turns: that of training, or of the suite. Raises ValueError for a name of no group of the job."""
        index = eval_index(group)
        if index is None:
            return self.rollout.model_copy(update={"group_size": 1}) if self.demonstrates(group) else self.rollout
        suite, _ = self.evaluation.at(index)
        own: dict[str, object] = {"group_size": suite.samples}
        own |= {} if suite.temperature is None else {"temperature": suite.temperature}
        own |= {} if suite.max_tokens is None else {"max_tokens": suite.max_tokens}
        return self.rollout.model_copy(update=own)

    def suite_environment(self, group: str) -> str:
        """Return the suite whose own environment plays a group; empty: the job's environment does. Raises ValueError as `sampling`."""
        index = eval_index(group)
        suite = None if index is None else self.evaluation.at(index)[0]
        return "" if suite is None or suite.environment is None else suite.name

    @property
    def learner(self) -> AgentSettings | None:
        """The agent that begins with supervised fine-tuning (`initFrom.sft`); None if there is none."""
        return next((one for one in self.agents if one.init_from is not None and one.init_from.sft is not None), None)

    @property
    def sft(self) -> SftSettings | None:
        """The supervised fine-tuning of the first steps."""
        learner = self.learner
        return None if learner is None or learner.init_from is None else learner.init_from.sft

    @property
    def demonstrated_steps(self) -> int:
        """Number of the first steps that train demonstrations; all, with the algorithm `sft`."""
        if self.training.algorithm == "sft":
            return self.training.steps
        return 0 if self.sft is None else self.sft.steps

    @property
    def demonstrated_groups(self) -> int:
        """Number of the first groups that are demonstrated, with `initFrom.sft`."""
        return 0 if self.sft is None else self.sft.steps * self.sft.rows_per_step

    @property
    def rows_per_step(self) -> int:
        """Number of groups in a step that trains demonstrations."""
        return self.training.groups_per_step if self.sft is None else self.sft.rows_per_step

    @property
    def group_size(self) -> int:
        """Number of episodes in a group of training, after the demonstrations of `initFrom.sft`. A demonstration is a group of one."""
        return 1 if self.training.algorithm == "sft" else self.rollout.group_size

    def demonstrates(self, group: str) -> bool:
        """Return whether a group's turns are demonstrated, not sampled. Raises ValueError for a name of no group."""
        token = group_token(group)
        is_first = token.startswith("t") and self.demonstrated_groups > int(token[1:])
        return is_first or (token.startswith("t") and self.training.algorithm == "sft")

    def measured(self, group: str) -> tuple[int, ...]:
        """Return the held-out tasks whose demonstrations are measured, and not trained, with a demonstrated group; empty for most.

        They are measured in the first and the last step of demonstrations, and after every `evaluation.every` steps: `evaluation.tasks` of
        them, at least as many as the step trains, divided among its groups. The same ones each time. Raises ValueError for a name of no
        group.
        """
        if not self.demonstrates(group):
            return ()
        step, position = divmod(int(group_token(group)[1:]), self.rows_per_step)
        if step % self.evaluation.every and step != self.demonstrated_steps - 1:
            return ()
        number = max(self.rows_per_step, self.evaluation.tasks)
        return tuple(range(position, number, self.rows_per_step))[: MAX_TURNS_FACTOR - 1]

    def evaluates(self, finished: int, steps: int | None = None) -> bool:
        """Return whether the version after `finished` steps is evaluated: the first, the last, those after every `every` steps.

        That after the steps of demonstrations is, too. steps: of the job; None: as in the spec.
        """
        spec, marks = self.evaluation, (0, self.demonstrated_steps)
        is_marked = finished in marks or finished >= (self.training.steps if steps is None else steps)
        return spec.num_tasks > 0 and (is_marked or finished % spec.every == 0)

    @property
    def num_pinned(self) -> int:
        """Number of agents that need adapter slots: each policy, and each player of past versions."""
        return sum(agent.pinned_as == agent.name for agent in self.agents)

    def players(self, policy: str) -> tuple[AgentSettings, ...]:
        """Return the agents that play an agent's policy, itself included."""
        return tuple(agent for agent in self.agents if agent.policy_name == policy)

    @property
    def open_episodes(self) -> int:
        """Number of training episodes that may be open at once: those of the steps in flight, as far as sandboxes play them."""
        in_steps = (1 + self.training.max_staleness) * self.training.groups_per_step * self.group_size
        demonstrated = 2 * self.rows_per_step if self.demonstrated_steps else 0
        return min(max(in_steps, demonstrated), self.environment.concurrency * self.environment.replicas)

    @property
    def steps_ahead(self) -> int:
        """Number of steps whose groups may be issued before an earlier step is on record.

        With several policies a strict job issues one: a turn waits only for the commit of its own agent. Demonstrations wait for none.
        """
        return self.training.max_staleness or int(len(self.policies) > 1 or self.demonstrated_steps > 0)

    def num_copies(self, agent: AgentSettings) -> int:
        """Return the number of copies of its adapter's size that an agent needs in the trainer.

        Weights, gradient and two moments; the KL reference; the parameters of the step's beginning, where a step is several updates.
        """
        is_proximal = self.training.ratio == "proximal" and self.training.algorithm != "sft"
        has_first = agent.trainable and self.training.has_several_updates and is_proximal
        return TRAINED_COPIES + self.has_reference_adapter(agent) + has_first

    def has_reference_adapter(self, agent: AgentSettings) -> bool:
        """Return whether an agent's KL reference needs an adapter in the trainer: it is another policy than the base model."""
        kl = self.training_of(agent).kl
        is_adapter = agent.init_from is not None or kl.reference != ReferenceSettings()
        return agent.trainable and kl.coefficient > 0 and is_adapter

    def training_of(self, agent: AgentSettings) -> TrainingSettings:
        """Return an agent's training settings: the job's, with what the agent's own replace."""
        own = agent.training or AgentTrainingSettings()
        given = {} if own.optimizer is None else own.optimizer.model_dump(exclude_none=True)
        optimizer = self.training.optimizer.model_copy(update=given)
        return self.training.model_copy(
            update={"optimizer": optimizer, "entropy": own.entropy or self.training.entropy}
        )

    def sft_of(self, agent: AgentSettings) -> TrainingSettings | None:
        """Return the settings of an agent's first steps, if they train demonstrations and the others do not; None otherwise."""
        learner, sft = self.learner, self.sft
        if learner is None or sft is None or learner.name != agent.name:
            return None
        own = self.training_of(agent)
        rate = own.optimizer.learning_rate if sft.learning_rate is None else sft.learning_rate
        constant = {"learning_rate": rate, "schedule": "constant", "warmup_steps": 0, "min_learning_rate_ratio": None}
        return TrainingSettings(
            algorithm="sft",
            steps=sft.steps,
            groups_per_step=sft.rows_per_step,
            microbatch_tokens=own.microbatch_tokens,
            optimizer=own.optimizer.model_copy(update=constant),
            max_staleness=own.max_staleness,
            deterministic=own.deterministic,
            seed=own.seed,
        )
