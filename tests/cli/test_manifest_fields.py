"""Bad fields and exactly what is said of them."""

from collections.abc import Callable

import pytest

NAME = "metadata: {name: sums, namespace: team-a}"
ENVIRONMENT = "environment: {name: reverse}"
ROLLOUT = "rollout: {groupSize: 4}"
TRAINING = "training: {steps: 3}"
RANKS = "1, 8, 16, 32, 64, 128, 256, 320, 512"
LABEL = "lower-case letters, digits and '-', beginning and ending with a letter or digit (no dots)"


def _agent(body: str) -> tuple[str, str]:
    return (ROLLOUT, f"{ROLLOUT}\n  agents:\n    - {{name: policy, {body}}}")


def _spec(line: str) -> tuple[str, str]:
    return (ROLLOUT, f"{ROLLOUT}\n  {line}")


TABLE = {
    "an unknown field near a right one": (
        (TRAINING, "training: {steps: 3, stepz: 4}"),
        "21: spec.training.stepz: unknown field; did you mean 'steps'?",
    ),
    "an unknown field near none": (
        ("poolRef: {name: tiny}", "poolRef: {name: tiny, xyz: 1}"),
        "18: spec.poolRef.xyz: unknown field; 'spec.poolRef' takes name",
    ),
    "snake case": (
        (ROLLOUT, "rollout: {group_size: 4}"),
        "20: spec.rollout.group_size: unknown field; did you mean 'groupSize'?",
    ),
    "a field at the wrong place": (
        _spec("rank: 8"),
        "21: spec.rank: unknown field; did you mean 'spec.agents[].adapter.rank'?",
    ),
    "an unknown field of the object": (
        (NAME, f"{NAME}\nmetadatas: 1"),
        "17: metadatas: unknown field; did you mean 'metadata'?",
    ),
    "an unknown field of metadata": (
        (NAME, "metadata: {name: sums, namespcae: team-a}"),
        "16: metadata.namespcae: unknown field; did you mean 'namespace'?",
    ),
    "text for a number": (
        (TRAINING, 'training: {steps: "3"}'),
        "21: spec.training.steps: expected a whole number, found the text '3'; remove the quotes",
    ),
    "words for a number": (
        (TRAINING, "training: {steps: many}"),
        "21: spec.training.steps: expected a whole number, found the text 'many'",
    ),
    "a fraction for a whole number": (
        (TRAINING, "training: {steps: 1.5}"),
        "21: spec.training.steps: expected a whole number, found 1.5",
    ),
    "a truth for a number": (
        (TRAINING, "training: {steps: yes}"),
        "21: spec.training.steps: expected a whole number, found true",
    ),
    "a number for text": (
        ("poolRef: {name: tiny}", "poolRef: {name: 7}"),
        "18: spec.poolRef.name: expected text, found 7; put it in quotes",
    ),
    "text for a truth": (_spec("suspend: maybe"), "21: spec.suspend: expected true or false, found the text 'maybe'"),
    "a list for a mapping": (
        (TRAINING, "training: [steps, 3]"),
        "21: spec.training: expected a mapping of keys to values, found a list; 'spec.training' takes algorithm, steps, groupsPerStep, "
        "microbatchTokens, optimizer, maxStaleness, maxRefill, ratio, clip, kl, entropy, correction, overlong, data and seed",
    ),
    "text for a mapping": (
        ("poolRef: {name: tiny}", "poolRef: tiny"),
        "18: spec.poolRef: expected a mapping of keys to values, found the text 'tiny'; 'spec.poolRef' takes name",
    ),
    "a mapping for a list": (_spec("agents: {name: policy}"), "21: spec.agents: expected a list, found a mapping"),
    "nothing where something is required": (
        (TRAINING, "training: {steps: }"),
        "21: spec.training.steps: required, but missing (Number of optimizer steps to train; may be raised later)",
    ),
    "a required field that is not there": (
        (TRAINING, "suspend: true"),
        "17: spec.training: required, but missing (Algorithm, loss, optimizer and data)",
    ),
    "a number below its bound": (
        (ROLLOUT, "rollout: {groupSize: 1}"),
        "20: spec.rollout.groupSize: must be at least 2, found 1",
    ),
    "a number at an open bound": (
        (TRAINING, "training: {steps: 3, optimizer: {learningRate: 0}}"),
        "21: spec.training.optimizer.learningRate: must be more than 0, found 0",
    ),
    "a temperature at which no engine samples": (
        (ROLLOUT, "rollout: {temperature: 0.001}"),
        "20: spec.rollout.temperature: must be at least 0.01, found 0.001",
    ),
    "a number above its bound": (
        (TRAINING, "training: {steps: 3, maxStaleness: 17}"),
        "21: spec.training.maxStaleness: must be at most 16, found 17",
    ),
    "a number at an open upper bound": (
        (TRAINING, "training: {steps: 3, clip: {low: 1}}"),
        "21: spec.training.clip.low: must be less than 1, found 1",
    ),
    "a word that is no choice": (
        (TRAINING, "training: {steps: 3, algorithm: gropo}"),
        "21: spec.training.algorithm: must be one of grpo, dr-grpo, dapo, gspo, rloo, reinforce++, cispo; found 'gropo'; did you mean 'grpo'?",
    ),
    "a number that is no choice": (
        _agent("adapter: {rank: 12}"),
        f"22: spec.agents[0].adapter.rank: must be one of {RANKS}; found 12",
    ),
    "a name with a dot": (
        (NAME, "metadata: {name: my.sums, namespace: team-a}"),
        f"16: metadata.name: must be {LABEL}; found 'my.sums'",
    ),
    "a long name": (
        (NAME, f"metadata: {{name: {'a' * 64}, namespace: team-a}}"),
        "16: metadata.name: must have at most 63 characters, found 64",
    ),
    "no name": (
        (NAME, "metadata: {namespace: team-a}"),
        "16: metadata.name: required, but missing (Name of the object: lower-case letters, digits and '-', at most 63, "
        "no dots (it is part of subjects))",
    ),
    "an empty list of agents": (_spec("agents: []"), "21: spec.agents: must have at least 1 entry, found 0"),
    "a pair of three": (
        (TRAINING, "training: {steps: 3, optimizer: {betas: [0.9, 0.99, 0.999]}}"),
        "21: spec.training.optimizer.betas: must have at most 2 entries, found 3",
    ),
    "a quantity with a wrong unit": (
        (ENVIRONMENT, "environment: {name: reverse, memory: 512MB}"),
        "19: spec.environment.memory: must be a quantity, for example 512Mi, 2 or 0.5; found '512MB'",
    ),
    "a quantity that is a fraction": (
        (ENVIRONMENT, "environment: {name: reverse, memory: 0.5}"),
        "19: spec.environment.memory: expected text, found 0.5; put it in quotes",
    ),
    "a layer's whole path": (
        _agent("adapter: {targets: [self_attn.q_proj]}"),
        "22: spec.agents[0].adapter.targets[0]: must be the last component of a linear layer's name, for example q_proj; "
        "found 'self_attn.q_proj'",
    ),
    "a layer twice": (
        _agent("adapter: {targets: [q_proj, k_proj, q_proj]}"),
        "22: spec.agents[0].adapter.targets: 'q_proj' is listed twice",
    ),
    "two agents of one name": (
        _spec("agents: [{name: policy}, {name: policy}]"),
        "17: spec: agents must have different names",
    ),
    "an environment by name and image": (
        (ENVIRONMENT, "environment: {name: reverse, image: games, entrypoint: [play]}"),
        "19: spec.environment: give exactly one of name and image; found both",
    ),
    "an environment by neither": (
        (ENVIRONMENT, "environment: {replicas: 2}"),
        "19: spec.environment: give exactly one of name and image; found neither",
    ),
    "an image without a command": (
        (ENVIRONMENT, "environment: {image: games}"),
        "19: spec.environment: image needs entrypoint, the command that serves the environment",
    ),
    "a command without an image": (
        (ENVIRONMENT, "environment: {name: reverse, entrypoint: [play]}"),
        "19: spec.environment: entrypoint needs image: it is the command that runs in the image",
    ),
    "an environment whose name is a path": (
        (ENVIRONMENT, "environment: {name: games/guess.py}"),
        "19: spec.environment.name: must be the name of a builtin environment, or module:attribute for your own; "
        "found 'games/guess.py'",
    ),
    "the same Secret twice": (
        (ENVIRONMENT, "environment: {name: reverse, secretRefs: [{name: a}, {name: a}]}"),
        "19: spec.environment: secretRefs must have different names",
    ),
    "promotion by an evaluation that never is": (
        _spec("evaluation: {tasks: 0, promote: best}"),
        "21: spec.evaluation: promote: best needs evaluations, but tasks is 0: raise tasks, or set promote: last",
    ),
    "two models of one pool": (
        ("model: {builtin: tiny}", "model: {builtin: tiny, path: /models/x}"),
        "5: spec.model: give exactly one of builtin, path, pvc and hub; found builtin and path",
    ),
    "no model of a pool": (
        ("model: {builtin: tiny}", "model: {}"),
        "5: spec.model: give exactly one of builtin, path, pvc and hub; found none",
    ),
    "a hub model that is an address": (
        ("model: {builtin: tiny}", "model: {hub: {id: 'https://hub/x/y'}}"),
        "5: spec.model.hub.id: must be a repository of the hub, for example Qwen/Qwen3-0.6B; found 'https://hub/x/y'",
    ),
    "no space after a colon": (
        (ROLLOUT, "rollout: {groupSize:16}"),
        "20: spec.rollout['groupSize:16']: unknown field; write a space after the colon: 'groupSize: 16'",
    ),
    "a key without a value that there is not": (
        (ROLLOUT, "rollout: {groups: }"),
        "20: spec.rollout.groups: unknown field; did you mean 'groupSize'?",
    ),
    "another library's name of a field that is elsewhere": (
        (TRAINING, "training: {steps: 3, learning_rate: 1e-4}"),
        "21: spec.training.learning_rate: unknown field; did you mean 'spec.training.optimizer.learningRate'?",
    ),
    "a namespace twice in one Tenant": (
        ("namespaces: [team-a]", "namespaces: [team-a, team-a]"),
        "12: spec.namespaces: 'team-a' is listed twice",
    ),
}


@pytest.mark.parametrize(("edit", "line"), TABLE.values(), ids=TABLE)
def test_a_bad_field_is_named_with_its_line_and_what_was_expected(
    complaints: Callable[..., list[str]], edit: tuple[str, str], line: str
) -> None:
    assert complaints(edit) == [f"job.yaml:{line}"]


@pytest.mark.parametrize("key", ["topP", "topK", "minP", "presencePenalty", "frequencyPenalty", "repetitionPenalty"])
def test_sampling_that_the_trainer_cannot_reproduce_is_refused_with_the_reason(
    complaints: Callable[..., list[str]], key: str
) -> None:
    assert complaints((ROLLOUT, f"rollout: {{{key}: 0.5}}")) == [
        f"job.yaml:20: spec.rollout.{key}: refused: temperature is the only sampling setting that the trainer can "
        f"reproduce; {key} makes the engine sample from another distribution than the one whose logprobs are trained on. "
        "Remove it"
    ]


def test_every_error_is_told_at_once_in_the_order_of_the_lines(complaints: Callable[..., list[str]]) -> None:
    lines = complaints(
        (TRAINING, "training: {steps: 0, algorithm: ppo}"), (ROLLOUT, "rollout: 5"), ("maxRank: 16", "maxRank: 17")
    )
    assert [line.split(":")[1] for line in lines] == ["6", "20", "21", "21"]


def test_one_wrong_agent_is_not_also_an_agent_too_few(complaints: Callable[..., list[str]]) -> None:
    assert complaints(_spec("agents: [{trainable: true}]")) == [
        "job.yaml:21: spec.agents[0].name: required, but missing (Name of the agent, by which environments request its turns)"
    ]


def test_null_means_absent_as_in_kubernetes(complaints: Callable[..., list[str]]) -> None:
    assert complaints(_spec("evaluation:\n  activeDeadlineSeconds: null")) == []


def test_the_right_manifest_has_nothing_wrong(complaints: Callable[..., list[str]]) -> None:
    assert complaints() == []
