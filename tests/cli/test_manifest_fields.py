"""Bad fields and exactly what is said of them."""

from collections.abc import Callable

import pytest

Complaints = Callable[..., list[str]]
Edit = str | tuple[str, str]
RANKS = "1, 8, 16, 32, 64, 128, 256, 320, 512"
LABEL = "lower-case letters, digits and '-', beginning and ending with a letter or digit (no dots)"
WHOLE, MAPPING = "expected a whole number, found", "expected a mapping of keys to values, found"
ENVIRONMENT_NAME = "must be the name of a builtin environment, or module:attribute for your own"

TABLE = {
    # Unknown fields
    "training: {steps: 3, stepz: 4}": "21: spec.training.stepz: unknown field; did you mean 'steps'?",
    "poolRef: {name: tiny, xyz: 1}": "18: spec.poolRef.xyz: unknown field; 'spec.poolRef' takes name",
    "rollout: {group_size: 4}": "20: spec.rollout.group_size: unknown field; did you mean 'groupSize'?",
    "rank: 8": "22: spec.rank: unknown field; did you mean 'spec.agents[].adapter.rank'?",
    "metadata: {name: sums, namespcae: team-a}": "16: metadata.namespcae: unknown field; did you mean 'namespace'?",
    "rollout: {groupSize:16}": "20: spec.rollout['groupSize:16']: unknown field; write a space after the colon: 'groupSize: 16'",
    "training: {steps: 3, learning_rate: 1e-4}": (
        "21: spec.training.learning_rate: unknown field; did you mean 'spec.training.optimizer.learningRate'?"
    ),
    # Values of another type
    'training: {steps: "3"}': f"21: spec.training.steps: {WHOLE} the text '3'; remove the quotes",
    "training: {steps: 1.5}": f"21: spec.training.steps: {WHOLE} 1.5",
    "poolRef: {name: 7}": "18: spec.poolRef.name: expected text, found 7; put it in quotes",
    "suspend: maybe": "22: spec.suspend: expected true or false, found the text 'maybe'",
    "training: [steps, 3]": (
        f"21: spec.training: {MAPPING} a list; 'spec.training' takes algorithm, steps, groupsPerStep, microbatchTokens, "
        "optimizer, maxStaleness, maxRefill, ratio, clip, baseline, kl, entropy, correction, overlong, data and seed"
    ),
    # Values that are missing
    "training: {steps: }": (
        "21: spec.training.steps: required, but missing (Number of optimizer steps to train; may be raised later)"
    ),
    "metadata: {namespace: team-a}": (
        "16: metadata.name: required, but missing (Name of the object: lower-case letters, digits and '-', at most 63, "
        "no dots (it is part of subjects))"
    ),
    ("training: {steps: 3}", "suspend: true"): (
        "17: spec.training: required, but missing (Algorithm, loss, optimizer and data)"
    ),
    # Values out of their bounds
    "rollout: {groupSize: 0}": "20: spec.rollout.groupSize: must be at least 1, found 0",
    "rollout: {groupSize: 1}": (
        "20: spec.rollout.groupSize: groupSize 1 has nothing to compare a reward with; set at least 2, or training.baseline.type: running-mean"
    ),
    "training: {steps: 3, optimizer: {learningRate: -0.1}}": (
        "21: spec.training.optimizer.learningRate: must be at least 0, found -0.1"
    ),
    "training: {steps: 3, clip: {low: 1}}": "21: spec.training.clip.low: must be less than 1, found 1",
    "training: {steps: 3, algorithm: gropo}": (
        "21: spec.training.algorithm: must be one of grpo, dr-grpo, dapo, gspo, rloo, reinforce++, cispo; found 'gropo'; "
        "did you mean 'grpo'?"
    ),
    "metadata: {name: my.sums, namespace: team-a}": f"16: metadata.name: must be {LABEL}; found 'my.sums'",
    "environment: {name: reverse, memory: 512MB}": (
        "19: spec.environment.memory: must be a quantity, for example 512Mi, 2 or 0.5; found '512MB'"
    ),
    "agents: [{name: policy, adapter: {targets: [self_attn.q_proj]}}]": (
        "22: spec.agents[0].adapter.targets[0]: must be the last component of a linear layer's name, for example q_proj; "
        "found 'self_attn.q_proj'"
    ),
    "environment: {name: games/guess.py}": f"19: spec.environment.name: {ENVIRONMENT_NAME}; found 'games/guess.py'",
    # Values that stand twice, or exclude or need each other
    "agents: [{name: policy, adapter: {targets: all-linear}}]": (
        "22: spec.agents[0].adapter.targets: all-linear is what leaving it out means: remove targets to adapt all linear layers"
    ),
    "agents: [{name: policy, adapter: {targets: [q_proj, k_proj, q_proj]}}]": (
        "22: spec.agents[0].adapter.targets: 'q_proj' is listed twice"
    ),
    "agents: [{name: policy}, {name: policy}]": "17: spec: agents must have different names",
    ("namespaces: [team-a]", "namespaces: [team-a, team-a]"): "12: spec.namespaces: 'team-a' is listed twice",
    "environment: {name: reverse, image: games, entrypoint: [play]}": (
        "19: spec.environment: give exactly one of name and image; found both"
    ),
    "environment: {image: games}": "19: spec.environment: image needs entrypoint, the command that serves the environment",
    "environment: {name: reverse, entrypoint: [play]}": (
        "19: spec.environment: entrypoint needs image: it is the command that runs in the image"
    ),
    "evaluation: {tasks: 0, promote: best}": (
        "22: spec.evaluation: promote: best needs evaluations, but tasks is 0: raise tasks, or set promote: last"
    ),
    "model: {builtin: tiny, path: /x}": (
        "5: spec.model: give exactly one of builtin, path, pvc and hub; found builtin and path"
    ),
    # The order of a job's data
    "training: {steps: 3, data: {skip: {}}}": (
        "21: spec.training.data: skip needs tasks: an endless stream contains every task once, so none can be skipped"
    ),
    "training: {steps: 3, data: {order: shuffled}}": (
        "21: spec.training.data: order: shuffled needs tasks: an endless stream has no order to shuffle"
    ),
}
RIGHT_DATA = ["{}", "{tasks: 5}", "{tasks: 5, order: shuffled}", "{tasks: 5, skip: {}}", "{tasks: 1, skip: {maxShare: 0.9}}"]  # fmt: skip


@pytest.mark.parametrize(("edit", "line"), TABLE.items())
def test_a_bad_field_is_named_with_its_line_and_what_was_expected(
    complaints: Complaints, edit: Edit, line: str
) -> None:
    assert complaints(edit) == [f"job.yaml:{line}"]


@pytest.mark.parametrize("key", ["topP", "topK", "minP", "presencePenalty", "frequencyPenalty", "repetitionPenalty"])
def test_sampling_that_the_trainer_cannot_reproduce_is_refused_with_the_reason(
    complaints: Complaints, key: str
) -> None:
    assert complaints(f"rollout: {{{key}: 0.5}}") == [
        f"job.yaml:20: spec.rollout.{key}: refused: temperature is the only sampling setting that the trainer can "
        f"reproduce; {key} makes the engine sample from another distribution than the one whose logprobs are trained on. "
        "Remove it"
    ]


def test_every_error_is_told_at_once_in_the_order_of_the_lines(complaints: Complaints) -> None:
    lines = complaints("training: {steps: 0, algorithm: ppo}", "rollout: 5", "maxRank: 17")
    assert [line.split(":")[1] for line in lines] == ["6", "20", "21", "21"]


RIGHT = ["training: {steps: 3}", "evaluation:\n  activeDeadlineSeconds: null"]


@pytest.mark.parametrize("edit", [*RIGHT, *(f"training: {{steps: 3, data: {text}}}" for text in RIGHT_DATA)])
def test_a_right_field_is_taken_and_null_means_absent_as_in_kubernetes(complaints: Complaints, edit: str) -> None:
    assert complaints(edit) == []
