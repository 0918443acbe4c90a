"""Meaning and advice of every reason, for `kubectl marlaas why`, docs/reasons.md and the README. Pure data."""

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
        "The orchestrator has not spoken of the job: of a new one not yet, of a running one no more.",
        "Wait a few seconds. If it lasts, the platform team looks whether the orchestrator's pod runs.",
    ),
    Reason.ADMITTED: Text(
        ReasonStage.WORKING, Actor.NOBODY, "The job holds its adapter slots and its sandboxes may start.", NOTHING
    ),
    Reason.SANDBOX_STARTING: Text(
        ReasonStage.WORKING, Actor.NOBODY, "The job is admitted and its sandbox pods are starting.", NOTHING
    ),
    Reason.SANDBOX_READY: Text(ReasonStage.WORKING, Actor.NOBODY, "The job's sandbox pods are ready.", NOTHING),
    Reason.WAITING_FOR_TRAINER: Text(
        ReasonStage.WORKING,
        Actor.PLATFORM,
        "The job is admitted and waits for a trainer of its pool to publish version 0 of the adapter.",
        "Wait while the trainer starts. If it lasts, look at the pool's TRAINER column and its TrainerReady condition.",
    ),
    Reason.WAITING_FOR_BUS_SPACE: Text(
        ReasonStage.WORKING,
        Actor.PLATFORM,
        "The job waits: the message bus has no room for the turns of another step, or for turns at all.",
        "Wait while other jobs finish their steps. If it lasts, enlarge the stream TURNS (docs/operations.md, Sizing), or have the job's "
        "steps made smaller.",
    ),
    Reason.TRAINING: Text(ReasonStage.WORKING, Actor.NOBODY, "Episodes are played and trained on.", NOTHING),
    Reason.EVALUATING: Text(
        ReasonStage.WORKING, Actor.NOBODY, "The steps are done and the last evaluation on held-out tasks runs.", NOTHING
    ),
    Reason.FINISHED: Text(
        ReasonStage.ENDED,
        Actor.TENANT,
        "The job did all its steps and its adapter is published.",
        "Fetch the adapter with `kubectl marlaas adapter NAME --out DIR`, or from the folder of the blob store that status.agents names.",
    ),
    Reason.SUSPENDED: Text(
        ReasonStage.WAITING,
        Actor.TENANT,
        "The job is stopped because spec.suspend is true; it keeps what it learnt and holds no slots.",
        "Run `kubectl marlaas resume NAME` to go on from the last committed step.",
    ),
    Reason.DELETING: Text(
        ReasonStage.WAITING,
        Actor.NOBODY,
        "The object is being deleted: its slots, files and messages are given back first.",
        "Wait; if the bus does not answer, the object goes after a minute all the same.",
    ),
}

_ADMISSION = {
    Reason.NOT_ADMITTED: Text(
        ReasonStage.WAITING,
        Actor.NOBODY,
        "The job is not admitted, so nothing of it runs.",
        "Look at the condition Admitted, which says what it waits for.",
    ),
    Reason.POOL_NOT_FOUND: Text(
        ReasonStage.WAITING,
        Actor.TENANT,
        "There is no ModelPool of the name in spec.poolRef; the job waits for one.",
        "Choose a pool of `kubectl get modelpools`, in a new job, or ask the platform team for this one.",
    ),
    Reason.WAITING_FOR_POOL: Text(
        ReasonStage.WAITING,
        Actor.PLATFORM,
        "No engine of the pool is ready yet, or one that serves now cannot do what the job asks for.",
        "Wait while the engines start, or are replaced after a change of the pool. If it lasts, look at the pool's ROLLOUT column and its RolloutReady condition.",
    ),
    Reason.WAITING_FOR_SLOTS: Text(
        ReasonStage.WAITING,
        Actor.NOBODY,
        "The pool's adapter slots are held by running jobs, or kept for a job that was created earlier.",
        "Wait: the queue goes by creation time. spec.priority reorders the jobs of your own tenant; a pool with more adapterSlots takes more jobs at once.",
    ),
    Reason.NAMESPACE_NOT_ALLOWED: Text(
        ReasonStage.WAITING,
        Actor.PLATFORM,
        "The pool's spec.namespaces does not name the job's namespace, so the job cannot begin.",
        "Ask the platform team to add the namespace to the pool, whereupon the job begins; or create it anew in another pool.",
    ),
    Reason.NEVER_FITS: Text(
        ReasonStage.WAITING,
        Actor.TENANT,
        "The job asks for more than its pool's spec offers, even when the pool is empty; the message has both numbers.",
        "Create the job anew with less of what the message names, or in a larger pool; or ask the platform team to change the pool, whereupon the job begins.",
    ),
    Reason.UNSUPPORTED_AGENTS: Text(
        ReasonStage.WAITING,
        Actor.PLATFORM,
        "The job has several agents or a frozen one, which the orchestrator that runs now does not train.",
        "Wait if the installation is being upgraded; otherwise look whether operator and orchestrator are of the same release.",
    ),
}

_REFUSALS = {
    Reason.UNSUPPORTED: Text(
        ReasonStage.FAILED,
        Actor.TENANT,
        "The job asks for something that this version of MARLaaS does not do; the message names it.",
        "Change what the message names and create the job anew.",
    ),
}

_FAULTS = {
    Reason.INVALID_SPEC: Text(
        ReasonStage.FAULTY,
        Actor.TENANT,
        "The stored object breaks a rule of its kind, because it is older than the rule; the message names the field and the rule.",
        "Correct the field that the message names. A field of a job that cannot change is corrected in a new job; of a ModelPool or Tenant, ask the platform team.",
    ),
    Reason.BUS_UNAVAILABLE: Text(
        ReasonStage.FAULTY,
        Actor.PLATFORM,
        "The message bus (NATS) does not answer, or does not take the job's document; figures may be old, nothing is lost.",
        "Look whether the NATS pod runs and its volume has space. Everything goes on by itself once it answers.",
    ),
    Reason.IMAGE_CANNOT_BE_PULLED: Text(
        ReasonStage.FAULTY,
        Actor.TENANT,
        "A container's image cannot be pulled; the message names the pod and the registry's answer.",
        "Correct the pool's image or give it a pull secret. For a job's own image, create the pull secret that it names, or create the job anew: its environment "
        "cannot change.",
    ),
    Reason.POD_UNSCHEDULABLE: Text(
        ReasonStage.FAULTY,
        Actor.PLATFORM,
        "No node takes a pod; the message has the scheduler's words.",
        "Ask for less (cpu, memory, gpus; of a job in a new one, since its environment cannot change), correct node selectors and tolerations, or add a node.",
    ),
    Reason.POD_REFUSED: Text(
        ReasonStage.FAULTY,
        Actor.PLATFORM,
        "The cluster does not let a pod, or what it needs, be made: a quota, a limit range, an admission rule or a webhook.",
        "Do what the message says; it is the cluster's own sentence.",
    ),
    Reason.CONFIG_MISSING: Text(
        ReasonStage.FAULTY,
        Actor.TENANT,
        "A pod waits for a Secret, ConfigMap or volume that is not there.",
        "Create what the message names, in the pod's namespace; the pod starts by itself.",
    ),
    Reason.MODEL_NOT_FOUND: Text(
        ReasonStage.FAULTY,
        Actor.PLATFORM,
        "The pool's base model is not where spec.model says.",
        "Put the model there, or create a pool whose spec.model names the right place.",
    ),
    Reason.CONTAINER_CRASHING: Text(
        ReasonStage.FAULTY,
        Actor.PLATFORM,
        "A container ends again and again, or its pod was evicted for what it wrote; the message names it and has its last words.",
        "Read the last words. Of a sandbox, mend the environment's code, and create the job anew if its image gets another name; of a worker, the platform team reads `kubectl logs --previous`.",
    ),
    Reason.CONTAINER_OUT_OF_MEMORY: Text(
        ReasonStage.FAULTY,
        Actor.TENANT,
        "A container was killed because it went over its memory limit.",
        "Raise the limit: spec.rollout.memory or spec.trainer.memory of the pool for a worker; spec.environment.memory for a sandbox, in a new job, since a "
        "job's environment cannot change.",
    ),
    Reason.RECOVERED: Text(ReasonStage.WORKING, Actor.NOBODY, "What was wrong with a pod or the bus is over.", NOTHING),
}

_FAILURES = {
    Reason.BACKOFF_LIMIT_EXCEEDED: Text(
        ReasonStage.FAILED,
        Actor.TENANT,
        "The job's sandbox crashed more often than spec.backoffLimit allows.",
        "Mend what the last words in the message say and create the job anew.",
    ),
    Reason.DEADLINE_EXCEEDED: Text(
        ReasonStage.FAILED,
        Actor.TENANT,
        "The job was admitted for longer than spec.activeDeadlineSeconds.",
        "Give it more time or fewer steps and create it anew.",
    ),
    Reason.TOO_MANY_FAULTS: Text(
        ReasonStage.FAILED,
        Actor.TENANT,
        "Too large a share of the last episodes was lost to faults that the policy did not cause; waiting for an engine is none.",
        "Read the last fault in the message: `env` is the environment's own error, `infra` the platform's. Mend it and create the job anew.",
    ),
    Reason.TRAINING_FAILED: Text(
        ReasonStage.FAILED,
        Actor.TENANT,
        "Every trainer of the pool gave the job up, in the words of the message.",
        "Do what the message says, often shorter conversations or a smaller learning rate, and create the job anew.",
    ),
    Reason.BROKEN_INVARIANT: Text(
        ReasonStage.FAILED,
        Actor.PLATFORM,
        "The orchestrator found the job's records contradicting themselves, or failed three times in a row to go on with it, and stopped it rather than guess.",
        "Report it with the orchestrator's log; it is a bug. Create the job anew to go on meanwhile.",
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
    Reason.ROLLOUT_READY: Text(ReasonStage.WORKING, Actor.NOBODY, "Every engine of the pool serves.", NOTHING),
    Reason.TRAINER_READY: Text(ReasonStage.WORKING, Actor.NOBODY, "Every trainer of the pool is there.", NOTHING),
    Reason.READY: Text(ReasonStage.WORKING, Actor.NOBODY, "The pool takes jobs.", NOTHING),
    Reason.IN_USE: Text(
        ReasonStage.WAITING,
        Actor.TENANT,
        "The pool is to be deleted and jobs that are not finished use it; it goes when they go.",
        "Let the jobs that the message names finish, or delete them.",
    ),
    Reason.ACTIVE: Text(
        ReasonStage.WORKING,
        Actor.NOBODY,
        "The tenant's namespaces are its own; its weight and quota are shown, and decide nothing yet.",
        NOTHING,
    ),
    Reason.CONFLICTING_TENANTS: Text(
        ReasonStage.FAULTY,
        Actor.PLATFORM,
        "Two Tenants claim the same namespace; the older one has it.",
        "Remove the namespace from one of them.",
    ),
}

TEXTS: Mapping[Reason, Text] = {**_JOURNEY, **_ADMISSION, **_REFUSALS, **_FAULTS, **_FAILURES, **_PLATFORM}
"""Texts of all reasons, in the order in which users meet them."""


def text_of(word: str) -> Text | None:
    """Return meaning and advice of a reason; None for an unknown reason (written by a newer operator)."""
    return TEXTS[Reason(word)] if word in TEXTS else None
