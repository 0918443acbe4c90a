"""Meaning and advice of every reason, for `kubectl marlaas why`, docs/reference/reasons.md and the README. Pure data."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from marlaas_api.reasons import Reason


class ReasonStage(StrEnum):
    """The state of an object that a reason describes."""

    WAITING = "waiting"
    WORKING = "working"
    FAULTY = "faulty"
    ENDED = "ended"
    FAILED = "failed"


class Actor(StrEnum):
    """The party that has to act. The tenant wrote the RLJob; the platform team runs the installation."""

    NOBODY = "nobody"
    TENANT = "tenant"
    PLATFORM = "platform team"


@dataclass(frozen=True, slots=True)
class Text:
    """Meaning of a reason, and advice.

    meaning: a whole sentence about the object. advice: whole sentences that begin with a verb, addressed to `actor`.
    """

    stage: ReasonStage
    actor: Actor
    meaning: str
    advice: str


NOTHING = "Do nothing."
"""Advice of every reason that needs no action."""

_JOURNEY = {
    Reason.WAITING_FOR_ORCHESTRATOR: Text(
        ReasonStage.WAITING,
        Actor.NOBODY,
        "The orchestrator has not reported on the job: not yet if the job is new, or no longer if the job was running.",
        "Wait a few seconds. If it lasts, ask the platform team to check that the orchestrator's pod runs.",
    ),
    Reason.ADMITTED: Text(
        ReasonStage.WORKING, Actor.NOBODY, "The job is admitted to its pool, and its sandboxes can start.", NOTHING
    ),
    Reason.SANDBOX_STARTING: Text(
        ReasonStage.WORKING, Actor.NOBODY, "The job is admitted and its sandbox pods are starting.", NOTHING
    ),
    Reason.SANDBOX_READY: Text(ReasonStage.WORKING, Actor.NOBODY, "The job's sandbox pods are ready.", NOTHING),
    Reason.WAITING_FOR_TRAINER: Text(
        ReasonStage.WORKING,
        Actor.PLATFORM,
        "The job is admitted, and no trainer of its pool is ready, or none has published version 0 of the adapter yet.",
        "Wait while the trainer starts. If it lasts, look at the pool's TRAINER column and its TrainerReady condition.",
    ),
    Reason.WAITING_FOR_BUS_SPACE: Text(
        ReasonStage.WORKING,
        Actor.PLATFORM,
        "The job waits because the message bus has no space for the turns of its next step, or for any turns.",
        "Wait while other jobs finish their steps. If it lasts, enlarge the stream TURNS (docs/how-to/sizing.md), or ask the tenant for smaller steps.",
    ),
    Reason.TRAINING: Text(ReasonStage.WORKING, Actor.NOBODY, "Episodes are played and trained on.", NOTHING),
    Reason.EVALUATING: Text(
        ReasonStage.WORKING,
        Actor.NOBODY,
        "All steps are done, and the last evaluation on held-out tasks is running.",
        NOTHING,
    ),
    Reason.FINISHED: Text(
        ReasonStage.ENDED,
        Actor.TENANT,
        "The job has finished all steps, and its adapter is published.",
        "Fetch the adapter with `kubectl marlaas adapter NAME --out DIR`, or from its location in the blob store, which status.agents shows.",
    ),
    Reason.SUSPENDED: Text(
        ReasonStage.WAITING,
        Actor.TENANT,
        "The job is stopped because spec.suspend is true. It keeps its committed steps and holds no adapter slots.",
        "Run `kubectl marlaas resume NAME` to continue from the last committed step.",
    ),
    Reason.DELETING: Text(
        ReasonStage.WAITING,
        Actor.NOBODY,
        "The object is being deleted; its adapter slots, files and messages are released first.",
        "Wait. If the bus does not answer, the object is removed after a minute anyway.",
    ),
}

_ADMISSION = {
    Reason.NOT_ADMITTED: Text(
        ReasonStage.WAITING,
        Actor.NOBODY,
        "The job is not admitted, so it has no running pods.",
        "Look at the condition Admitted, whose message says what the job waits for.",
    ),
    Reason.POOL_NOT_FOUND: Text(
        ReasonStage.WAITING,
        Actor.TENANT,
        "No ModelPool has the name in spec.poolRef or in an agent's poolRef; the job waits until one is created.",
        "Create a new job with a pool that `kubectl get modelpools` lists, or ask the platform team to create this pool.",
    ),
    Reason.WAITING_FOR_POOL: Text(
        ReasonStage.WAITING,
        Actor.PLATFORM,
        "No engine of the pool is ready, or the running engines do not support the job's settings yet.",
        "Wait while the engines start, or restart after a change of the pool. If it lasts, look at the pool's ROLLOUT column and its RolloutReady condition.",
    ),
    Reason.WAITING_FOR_SLOTS: Text(
        ReasonStage.WAITING,
        Actor.NOBODY,
        "The pool has no room for all agents of the job, or reserves the room for another job.",
        "Wait: tenants with the smallest share for their weight go first. spec.priority orders the jobs of your own tenant.",
    ),
    Reason.WAITING_FOR_MEMORY: Text(
        ReasonStage.WAITING, Actor.NOBODY, "Running jobs hold KV cache or trainer memory that the job needs.", NOTHING
    ),
    Reason.OVER_QUOTA: Text(
        ReasonStage.WAITING,
        Actor.PLATFORM,
        "The tenant has reached a limit of its quota: further jobs are queued, and running jobs begin no new tasks while a rate is above its limit.",
        "Wait until other jobs of the tenant have ended or its rate has fallen. For the storage limit, delete jobs with adapterRetention: delete. Or ask the platform team for a larger quota.",
    ),
    Reason.TENANT_REQUIRED: Text(
        ReasonStage.WAITING,
        Actor.PLATFORM,
        "No Tenant has the job's namespace, and the installation requires one (the chart's value requireTenant).",
        "Ask the platform team to add the namespace to a Tenant; the job starts then.",
    ),
    Reason.PREEMPTED: Text(
        ReasonStage.WAITING,
        Actor.NOBODY,
        "The job made room for a tenant with a smaller share; it resumes later.",
        NOTHING,
    ),
    Reason.NAMESPACE_NOT_ALLOWED: Text(
        ReasonStage.WAITING,
        Actor.PLATFORM,
        "The pool's spec.namespaces does not contain the job's namespace, so the job cannot start.",
        "Ask the platform team to add the namespace to the pool; the job then starts. Or create a new job in another pool.",
    ),
    Reason.NEVER_FITS: Text(
        ReasonStage.WAITING,
        Actor.TENANT,
        "The job requests more than its pool's spec allows, even if the pool is empty; the message has both numbers.",
        "Create a new job with a smaller value of the field that the message names, or in a larger pool. Or ask the platform team to change the pool; the job "
        "then starts.",
    ),
    Reason.EGRESS_NOT_ALLOWED: Text(
        ReasonStage.WAITING,
        Actor.TENANT,
        "The installation opens no address of a range in environment.egress to jobs; the message has the range. The job does not start; one that runs already "
        "continues without the range.",
        "Create a new job without the range. Or ask the platform team to add it to network.jobEgress of the chart; the job then starts.",
    ),
}

_REFUSALS = {
    Reason.UNSUPPORTED: Text(
        ReasonStage.FAILED,
        Actor.TENANT,
        "The job uses a feature that this version of MARLaaS does not support; the message names the field.",
        "Change the field that the message names, and create a new job.",
    ),
}

_FAULTS = {
    Reason.INVALID_SPEC: Text(
        ReasonStage.FAULTY,
        Actor.TENANT,
        "The stored object violates a rule that was added after it was created; the message names the field and the rule. A new job also waits while the Tenant of its namespace violates one.",
        "Correct the field that the message names. If it is a field of a job that cannot change, create a new job. For a ModelPool or Tenant, ask the platform team.",
    ),
    Reason.BUS_UNAVAILABLE: Text(
        ReasonStage.FAULTY,
        Actor.PLATFORM,
        "The message bus (NATS) does not answer, or refuses the job's document. Numbers in statuses may be old; no data is lost.",
        "Check that the NATS pod runs and that its volume has space. Jobs continue without further action once the bus answers.",
    ),
    Reason.STORE_SILENT: Text(
        ReasonStage.FAULTY,
        Actor.PLATFORM,
        "The blob store does not answer, or answers with an error of its own. The job waits; no data is lost.",
        "Check that the blob store runs and that its address is right. The job continues by itself once the store answers.",
    ),
    Reason.STORE_FULL: Text(
        ReasonStage.FAULTY,
        Actor.PLATFORM,
        "The blob store, or the disk of the worker that the message names, is full. The job waits; no data is lost.",
        "Free some space, or raise the quota. The job continues by itself.",
    ),
    Reason.STORE_REFUSED: Text(
        ReasonStage.FAULTY,
        Actor.PLATFORM,
        "The blob store refuses a read or a write: a permission is missing, a credential has expired, or the disk is read-only. The job waits; no data is lost.",
        "Grant the worker that the message names read and write, or renew the credential. The job continues by itself.",
    ),
    Reason.UNREADABLE: Text(
        ReasonStage.FAULTY,
        Actor.PLATFORM,
        "A stored document or message of the job cannot be read by this release; the message names it and its schema version. The job waits, and nothing is deleted.",
        "Finish or repeat the upgrade, so that every worker has the release that wrote it. The job continues by itself.",
    ),
    Reason.IMAGE_CANNOT_BE_PULLED: Text(
        ReasonStage.FAULTY,
        Actor.TENANT,
        "A container's image cannot be pulled; the message names the pod and the registry's answer.",
        "Correct the pool's image or add a pull secret. For a job's environment image, create the pull secret that the job names. To change the image, create "
        "a new job, because its environment cannot change.",
    ),
    Reason.POD_UNSCHEDULABLE: Text(
        ReasonStage.FAULTY,
        Actor.PLATFORM,
        "No node can run a pod; the message contains the scheduler's reason.",
        "Lower the requests (cpu, memory, gpus), correct node selectors and tolerations, or add a node. A job's requests can only change in a new job.",
    ),
    Reason.POD_REFUSED: Text(
        ReasonStage.FAULTY,
        Actor.PLATFORM,
        "The cluster refused to create a pod or an object that the pod needs, because of a quota, a limit range, an admission rule or a webhook.",
        "Follow the message, which is the cluster's own error text. A job without a ready sandbox frees its slots and is tried again after a minute, two, four, up to an hour.",
    ),
    Reason.CONFIG_MISSING: Text(
        ReasonStage.FAULTY,
        Actor.TENANT,
        "A pod waits for a Secret, ConfigMap or volume that does not exist.",
        "Create the object that the message names, in the pod's namespace. The pod then starts.",
    ),
    Reason.MODEL_NOT_FOUND: Text(
        ReasonStage.FAULTY,
        Actor.PLATFORM,
        "The pool's base model was not found at the location in spec.model.",
        "Put the model there, or create a pool whose spec.model has the right location.",
    ),
    Reason.CONTAINER_CRASHING: Text(
        ReasonStage.FAULTY,
        Actor.PLATFORM,
        "A container crashes repeatedly, or its pod was evicted because it wrote too much to disk. The message names the container and its last error.",
        "Read the error. For a sandbox, fix the environment's code; if that changes the image's name, create a new job. For a worker, ask the platform team to "
        "read `kubectl logs --previous`.",
    ),
    Reason.CONTAINER_OUT_OF_MEMORY: Text(
        ReasonStage.FAULTY,
        Actor.TENANT,
        "A container was killed because it exceeded its memory limit.",
        "Raise the limit. For a worker, it is spec.rollout.memory or spec.trainer.memory of the pool. For a sandbox, it is spec.environment.memory, in a new job, "
        "because a job's environment cannot change.",
    ),
    Reason.RECOVERED: Text(ReasonStage.WORKING, Actor.NOBODY, "A fault of a pod or of the bus is over.", NOTHING),
    Reason.HEALTHY: Text(
        ReasonStage.WORKING,
        Actor.NOBODY,
        "The figures of the job's last step and evaluation are within their bounds again.",
        NOTHING,
    ),
    Reason.EVALUATION_OVERLAP: Text(
        ReasonStage.FAULTY,
        Actor.TENANT,
        "Held-out tasks of the last evaluation were trained on, so that it does not show what the policy does on new tasks. Tasks are compared by their first "
        "prompt and by the content that they draw.",
        "Draw the content of each task with task.draw or task.row, which hold one in eight out of training.",
    ),
    Reason.REPLIES_CUT: Text(
        ReasonStage.FAULTY,
        Actor.TENANT,
        "More than 30 % of the replies of the last step were cut at rollout.maxTokens or at the pool's maxModelLen.",
        "Raise rollout.maxTokens or the pool's maxModelLen, or ask for shorter replies. Models that think need thousands of tokens.",
    ),
    Reason.NO_SIGNAL: Text(
        ReasonStage.FAULTY,
        Actor.TENANT,
        "In more than 80 % of the groups of the last step all rewards are equal. They train nothing.",
        "Choose tasks that the policy sometimes solves, give a finer reward, or skip such tasks with training.data.skip.",
    ),
    Reason.MIXED_GROUPS: Text(
        ReasonStage.FAULTY,
        Actor.TENANT,
        "Members of a group began with different prompts, so that their rewards do not compare.",
        "Draw all content of a task from task.rng, task.draw or task.row, and use no other randomness.",
    ),
    Reason.ONE_PROMPT: Text(
        ReasonStage.FAULTY,
        Actor.TENANT,
        "All tasks of the last step begin with the same prompt, and draw no content with task.draw or task.row.",
        "If the prompts should differ, draw from task.rng: a generator that was made at import repeats. If the tasks differ in what they hide, draw it with "
        "task.draw.",
    ),
    Reason.ENGINE_MISMATCH: Text(
        ReasonStage.FAULTY,
        Actor.TENANT,
        "The logprobs of engine and trainer differ much: the effective sample size is below 0.9, or on-policy tokens differ by more than 0.1 nats.",
        "Lower training.maxStaleness or the learning rate. If it stays, ask the platform team for a pool with another dtype or another kind of CPU.",
    ),
}

_REPORTS = {
    Reason.REPORTING: Text(
        ReasonStage.WORKING,
        Actor.NOBODY,
        "The destinations of spec.export have all that the job has made so far, or its end.",
        NOTHING,
    ),
    Reason.EXPORTER_STARTING: Text(
        ReasonStage.WORKING,
        Actor.NOBODY,
        "The pod that reports the job and uploads its adapters is starting; the job does not wait for it.",
        NOTHING,
    ),
    Reason.UPLOADING: Text(
        ReasonStage.WORKING,
        Actor.NOBODY,
        "The job has succeeded, and its adapters are being uploaded to hub, bucket or volume. Until then, at most for a day, ttlSecondsAfterFinished does not delete it.",
        NOTHING,
    ),
    Reason.REPORT_DELAYED: Text(
        ReasonStage.FAULTY,
        Actor.TENANT,
        "A tracker, a webhook, hub, bucket or volume does not answer or refuses a request, or the exporter's pod cannot run. The message has the cause and the time. The job goes on, and the exporter sends missing data later.",
        "Check the content of the Secrets that spec.export names, and whether the tracker, hub or store is up. For another egress or Secret, create a new job.",
    ),
}

_FAILURES = {
    Reason.BACKOFF_LIMIT_EXCEEDED: Text(
        ReasonStage.FAILED,
        Actor.TENANT,
        "The job's sandbox crashed more often than spec.backoffLimit allows.",
        "Fix the last error, which the message contains, and create a new job.",
    ),
    Reason.DEADLINE_EXCEEDED: Text(
        ReasonStage.FAILED,
        Actor.TENANT,
        "The job was admitted for longer than spec.activeDeadlineSeconds.",
        "Set a longer deadline or fewer steps, and create a new job.",
    ),
    Reason.INVALID_ENVIRONMENT: Text(
        ReasonStage.FAILED,
        Actor.TENANT,
        "The environment does not fit the job: the sandbox does not find it, its arguments are wrong, it names an agent that the job lacks, or its episodes need too much memory. Playing again would not help.",
        "Follow the message, which says what was expected, and create a new job.",
    ),
    Reason.TOO_MANY_FAULTS: Text(
        ReasonStage.FAILED,
        Actor.TENANT,
        "More than spec.environment.maxFaultShare of the recent episodes were lost to faults. Time waiting for an engine does not count as a fault.",
        "Read the last fault in the message: `env` is an error of the environment, `infra` one of the platform. Fix it and create a new job.",
    ),
    Reason.TRAINING_FAILED: Text(
        ReasonStage.FAILED,
        Actor.TENANT,
        "Every trainer of the pool gave up the job; the message contains the reason.",
        "Follow the message (often: shorter conversations or a smaller learning rate), and create a new job.",
    ),
    Reason.BROKEN_INVARIANT: Text(
        ReasonStage.FAILED,
        Actor.PLATFORM,
        "The orchestrator found a contradiction in the job's records, or failed three times in a row to continue the job, and stopped it.",
        "Report it with the orchestrator's log; it is a bug. To continue meanwhile, create a new job.",
    ),
}

_PLATFORM = {
    Reason.ROLLOUT_STARTING: Text(
        ReasonStage.WAITING,
        Actor.NOBODY,
        "The pool's engines are starting.",
        "Wait: loading a model takes from seconds to many minutes.",
    ),
    Reason.TRAINER_STARTING: Text(
        ReasonStage.WAITING,
        Actor.NOBODY,
        "The pool's trainers are starting.",
        "Wait: loading a model takes from seconds to many minutes.",
    ),
    Reason.ROLLOUT_READY: Text(ReasonStage.WORKING, Actor.NOBODY, "All engines of the pool are ready.", NOTHING),
    Reason.TRAINER_READY: Text(ReasonStage.WORKING, Actor.NOBODY, "All trainers of the pool are ready.", NOTHING),
    Reason.READY: Text(ReasonStage.WORKING, Actor.NOBODY, "The pool accepts jobs.", NOTHING),
    Reason.IN_USE: Text(
        ReasonStage.WAITING,
        Actor.TENANT,
        "The pool is marked for deletion, but unfinished jobs use it; it is removed when they have finished.",
        "Wait until the jobs that the message names have finished, or delete them.",
    ),
    Reason.ACTIVE: Text(
        ReasonStage.WORKING, Actor.NOBODY, "The tenant's weight and quota apply to the jobs of its namespaces.", NOTHING
    ),
    Reason.CONFLICTING_TENANTS: Text(
        ReasonStage.FAULTY,
        Actor.PLATFORM,
        "Two Tenants claim the same namespace; it belongs to the older one.",
        "Remove the namespace from one of them.",
    ),
}

TEXTS: Mapping[Reason, Text] = {
    **_JOURNEY,
    **_ADMISSION,
    **_REFUSALS,
    **_FAULTS,
    **_REPORTS,
    **_FAILURES,
    **_PLATFORM,
}
"""Texts of all reasons, in the order in which users meet them."""


def text_of(word: str) -> Text | None:
    """Return meaning and advice of a reason; None for an unknown reason (written by a newer operator)."""
    return TEXTS[Reason(word)] if word in TEXTS else None
