"""The arguments of the environment `dataset`, as a manifest writes them."""

import os
import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from marlaas.envs.dataset.problems import InvalidArgument
from marlaas.envs.loading import nearest

KINDS = ("math", "answer", "format", "code", "python", "judge", "cosine", "shorter", "group")
"""Kinds of reward parts."""
RIGHT = ("math", "answer", "code")
"""Kinds that tell a right reply from a wrong one."""
_LENGTHS = ("cosine", "shorter")
_VOLUMES = ("pvc", "configMap")
OBJECTS = re.compile(r"s3://(?P<bucket>[\w.-]+)/(?P<key>.+)")
"""URL of objects; the key may be a pattern."""


def endpoint() -> str:
    """Return the address of the store of objects, as its client finds it; empty: that of the cloud."""
    return os.environ.get("AWS_ENDPOINT_URL") or os.environ.get("AWS_ENDPOINT", "")


class _Settings(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


def _listed(value: object) -> object:
    return (value,) if isinstance(value, str) else tuple(value) if isinstance(value, list) else value


def _bounds(value: object) -> object:
    return tuple(float(one) if type(one) is int else one for one in value) if isinstance(value, list) else value


Files = Annotated[tuple[str, ...], BeforeValidator(_listed), Field(min_length=1)]


def _of_bucket(urls: tuple[str, ...]) -> tuple[str, ...]:
    for url in urls:
        if OBJECTS.fullmatch(url) is None:
            raise ValueError(f"{url!r:.80} is no s3://BUCKET/KEY; the key may have the patterns *, ** and ?")
    return urls


Objects = Annotated[Files, AfterValidator(_of_bucket)]


class Source(_Settings):
    """Where rows come from: files of this machine, a data set of the Hugging Face hub, or objects of a bucket.

    files: paths or patterns with `*`; a relative one is read from the manifest's folder.
    s3: URLs, whose keys may be patterns with `*`.
    hub: organisation and name. config, split: of the hub's data set. revision: branch, tag or commit.
    """

    files: Files | None = None
    s3: Objects | None = None
    hub: str | None = Field(None, pattern=r"^[\w.-]+(/[\w.-]+)?$")
    config: str | None = None
    split: str | None = None
    revision: str | None = None

    @model_validator(mode="after")
    def _one(self) -> Self:
        if sum(one is not None for one in (self.files, self.hub, self.s3)) != 1:
            raise ValueError("give one of files, hub and s3")
        if self.hub is None and (self.config or self.split or self.revision):
            raise ValueError("config, split and revision are of a hub's data set; files and objects have none")
        return self


class HeldOut(_Settings):
    """The held-out rows: another split of the hub's data set, other files or objects, or a share of the rows.

    share: of the rows, by a hash of the prompt; 1 holds out all rows.
    """

    split: str | None = None
    files: Files | None = None
    s3: Objects | None = None
    share: float | None = Field(None, gt=0, le=1)

    @model_validator(mode="after")
    def _one(self) -> Self:
        if sum(one is not None for one in (self.split, self.files, self.s3, self.share)) != 1:
            raise ValueError("give one of split, files, s3 and share")
        return self


class PromptMessage(_Settings):
    """One message of the prompt. content: a Jinja template of the row's columns."""

    role: Literal["system", "user", "assistant"]
    content: str


class AnswerSettings(_Settings):
    """How the reward `answer` finds the answer in a reply: see `marlaas.envs.extraction`."""

    extract: str
    pattern: str | None = None


class CodeSettings(_Settings):
    """The reward `code`. tests: a Jinja template of the program that follows the policy's. cpu_s: seconds. memory_mib: mebibytes."""

    tests: str
    cpu_s: int = Field(5, ge=1)
    memory_mib: int = Field(256, ge=64)


class JudgeSettings(_Settings):
    """The reward `judge`: an agent of the job, or a service of chat completions.

    url: of the service, up to /v1. model: of the service. key: the environment variable that holds its key. prompt: a Jinja template of the
    row's columns, `reply` and `truth`. scale: the lowest and the highest number that the judge gives; they become 0 and 1. attempts: tries
    for a number, and for an answer of the service. pause_s: seconds before the second try, doubled before each further one.
    """

    agent: str | None = None
    url: str | None = Field(None, pattern=r"^https?://")
    model: str | None = None
    key: str | None = None
    prompt: str = Field(min_length=1)
    extract: str = "last_number"
    pattern: str | None = None
    scale: Annotated[tuple[float, float], BeforeValidator(_bounds)] = (0.0, 1.0)
    max_tokens: int = Field(256, ge=1)
    attempts: int = Field(3, ge=1, le=10)
    timeout_s: float = Field(60.0, gt=0)
    pause_s: float = Field(1.0, ge=0)

    @model_validator(mode="after")
    def _one(self) -> Self:
        if (self.agent is None) == (self.url is None):
            raise ValueError("give either agent, an agent of the job, or url and model of a service")
        if (self.url is None) != (self.model is None) or (self.url is None and self.key is not None):
            raise ValueError("url, model and key belong together: a service needs url and model")
        if not self.scale[0] < self.scale[1]:
            raise ValueError(f"scale is {list(self.scale)}; expected the lowest number, then the highest")
        return self


class CosineSettings(_Settings):
    """The reward `cosine`: see `marlaas.rewards.cosine_length`."""

    max_tokens: int = Field(ge=1)
    right: Annotated[tuple[float, float], BeforeValidator(_bounds)] = (2.0, 1.0)
    wrong: Annotated[tuple[float, float], BeforeValidator(_bounds)] = (-10.0, 0.0)
    exceeded: float = -10.0


class RewardSettings(_Settings):
    """One part of the reward: exactly one kind, and its weight."""

    math: dict[str, Any] | None = Field(None, max_length=0)
    answer: AnswerSettings | None = None
    format: str | None = None
    code: CodeSettings | None = None
    python: str | None = Field(None, pattern=r"^[\w.]+:\w+$")
    judge: JudgeSettings | None = None
    cosine: CosineSettings | None = None
    shorter: dict[str, Any] | None = Field(None, max_length=0)
    group: str | None = Field(None, pattern=r"^[\w.]+:\w+$")
    weight: float = Field(1.0, allow_inf_nan=False)

    @property
    def kind(self) -> str:
        """The kind of the part."""
        return next(kind for kind in KINDS if getattr(self, kind) is not None)


class Settings(_Settings):
    """All arguments.

    prompt: messages; or messages: the column that holds a list of messages. truth: a Jinja template; empty: the rewards need none.
    completion: a Jinja template of the demonstrated reply to `prompt`; empty: rows demonstrate nothing. Without rewards, replies are
    not scored.
    """

    source: Source
    rewards: tuple[RewardSettings, ...] = ()
    prompt: tuple[PromptMessage, ...] = ()
    messages: str | None = None
    truth: str = ""
    completion: str = ""
    held_out: HeldOut | None = None


def parsed(args: Mapping[str, Any]) -> Settings:
    """Parse the arguments. Raises InvalidArgument for the first one that is not valid."""
    given = {key: value for key, value in args.items() if value is not None}
    if isinstance(given.get("source"), Mapping):
        _refuse_volumes(given["source"])
    if isinstance(given.get("rewards"), Sequence):
        given["rewards"] = tuple(_reward(at, one) for at, one in enumerate(given["rewards"]))
    if isinstance(given.get("prompt"), list):
        given["prompt"] = tuple(given["prompt"])
    try:
        settings = Settings.model_validate(given)
    except ValidationError as error:
        raise _argument_of(error) from None
    _check_together(settings)
    return settings


def _refuse_volumes(source: Mapping[str, Any]) -> None:
    for name in _VOLUMES:
        if name in source:
            text = "name it in environment.volumes, and its files below the volume's name in source.files"
            raise InvalidArgument(text, "source", name)


def _reward(at: int, given: object) -> object:
    """Return a part with its short forms written out. Raises InvalidArgument if it has not exactly one kind."""
    if isinstance(given, str):
        given = {given: {}}
    if not isinstance(given, Mapping):
        raise InvalidArgument(f"{given!r:.80}; expected a mapping such as math: {{}}", "rewards", at)
    names = [name for name in given if name != "weight"]
    if len(names) != 1 or names[0] not in KINDS:
        raise InvalidArgument(_kinds_problem(names), "rewards", at)
    (name,) = names
    value = {} if given[name] is None else given[name]
    if name == "answer" and isinstance(value, str):
        value = {"extract": value}
    weight = given.get("weight", 1.0)
    return {name: value, "weight": float(weight) if type(weight) is int else weight}


def _kinds_problem(names: Sequence[str]) -> str:
    expected = f"expected one of {', '.join(KINDS)}"
    if not names:
        return f"no kind of reward; {expected}"
    unknown = next((name for name in names if name not in KINDS), None)
    if unknown is not None:
        return f"no kind of reward is named {unknown!r}{nearest(unknown, KINDS)}; {expected}"
    return f"several kinds ({', '.join(names)}): write each as an item of its own, with its weight"


def _check_together(settings: Settings) -> None:
    if bool(settings.prompt) == (settings.messages is not None):
        raise InvalidArgument(
            "give either prompt (a list of messages) or messages (the column that holds them)", "prompt"
        )
    if settings.completion and settings.messages is not None:
        text = "the replies to learn from are the assistant's messages of the column messages; remove completion"
        raise InvalidArgument(text, "completion")
    if not settings.rewards and not settings.completion and settings.messages is None:
        raise InvalidArgument("give rewards, which score replies, or completion, a reply to learn from", "rewards")
    needs_truth = next((one.kind for one in settings.rewards if one.kind in ("math", "answer")), None)
    if needs_truth and not settings.truth:
        raise InvalidArgument(f"the reward {needs_truth} needs truth, a template such as '{{{{ answer }}}}'", "rewards")
    if settings.held_out is not None and settings.held_out.split is not None and settings.source.hub is None:
        raise InvalidArgument(
            "this is a split of a hub's data set; for others, use files, s3 or share", "held_out", "split"
        )
    every = [one.kind for one in settings.rewards]
    if (of_length := next((one for one in every if one in _LENGTHS), None)) and not {*every} & {*RIGHT}:
        raise InvalidArgument(
            f"the reward {of_length} needs to know which replies are right: add {', '.join(RIGHT[:-1])} or {RIGHT[-1]}",
            "rewards",
        )
    kinds = [kind for kind in every if kind not in ("python", "group")]
    if doubled := [kind for kind in kinds if kinds.count(kind) > 1]:
        raise InvalidArgument(f"two parts {doubled[0]}: a part's name is a metric, so remove one", "rewards")


def _argument_of(error: ValidationError) -> InvalidArgument:
    """Return the first error of pydantic as a sentence."""
    first = error.errors(include_url=False, include_input=False)[0]
    loc = tuple(first["loc"])
    text = first["msg"].removeprefix("Value error, ")
    if first["type"] == "extra_forbidden":
        known = _known(loc[:-1])
        text = f"no such argument{nearest(str(loc[-1]), known)}; expected {', '.join(known)}"
    return InvalidArgument(f"{text[:1].lower()}{text[1:]}", *loc)


_MODELS: Mapping[str, type[BaseModel]] = {
    "source": Source,
    "held_out": HeldOut,
    "prompt": PromptMessage,
    "answer": AnswerSettings,
    "code": CodeSettings,
    "judge": JudgeSettings,
    "cosine": CosineSettings,
}


def _known(loc: Sequence[str | int]) -> list[str]:
    """Return the keys of the mapping at a place."""
    names = [part for part in loc if isinstance(part, str)]
    return list(_MODELS.get(names[-1], RewardSettings).model_fields if names else Settings.model_fields)
