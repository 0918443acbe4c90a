"""Messages about a job for people: which are due, and their delivery to a webhook, each once. Used by `marlaas run` and by the exporter.

The webhook's URL is a secret: it is in no text, log or error here. A message counts as told only after the webhook has taken it,
so a process that is killed in between tells it again.
"""

import json
import os
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from http.client import HTTPException
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit

from marlaas.http_post import post_json
from marlaas_api.errors import InvalidInput, Retryable
from marlaas_api.messages import JobDocument, Phase, Progress
from marlaas_api.messages.job_spec import NotifySettings

TIMEOUT_S = 10.0
_LONGEST_TEXT = 2000
_ESCAPES = {"&": "&amp;", "<": "&lt;", ">": "&gt;"}  # Slack takes <…> for links and for mentions of everybody


class WebhookFailed(Retryable):
    """The webhook cannot be reached, or refuses."""


@dataclass(frozen=True, slots=True)
class Message:
    """A message to one receiver. mark: its name, unique in the job; a message whose mark was told is not told again."""

    mark: str
    text: str


@dataclass(frozen=True, slots=True)
class JobNews:
    """State of a job from which `due` derives messages.

    Attributes:
        document: of the job.
        progress: the job's last published progress; None if there is none.
        active_at: unix seconds of the job's last record or admission, or of the caller's start, whichever is last.
        links: URLs of the job's runs in trackers; they are appended to messages.
    """

    document: JobDocument
    progress: Progress | None
    active_at: float
    links: tuple[str, ...] = ()


def variable(entry: int) -> str:
    """Return the environment variable with the URL of an entry of `export.notify`, counted from 0."""
    return f"MARLAAS_WEBHOOK_{entry + 1}"


def require_urls(document: JobDocument) -> None:
    """Raise InvalidInput if the URL of a webhook is missing, or is none."""
    for entry in range(len(document.spec.export.notify)):
        try:
            url_of(entry)
        except InvalidInput as error:
            raise InvalidInput(f"job {document.ref}: spec.export.notify[{entry}]: {error}") from None


def url_of(entry: int) -> str:
    """Return the URL of an entry. Raises InvalidInput, whose text does not have it."""
    url = os.environ.get(variable(entry), "").strip()
    try:
        parts = urlsplit(url)
        is_url = parts.scheme in ("http", "https") and bool(parts.hostname)
    except ValueError:
        is_url = False
    if not is_url:
        raise InvalidInput(f"the environment variable {variable(entry)} must have an http:// or https:// URL")
    return url


def due(news: JobNews, entry: int, told: Collection[str], now: float) -> Iterator[Message]:
    """Yield the messages to an entry of `export.notify` that are due and were not told."""
    for occasion, mark, text in _occasions(news, news.document.spec.export.notify[entry], now):
        if occasion in news.document.spec.export.notify[entry].when and f"{entry} {mark}" not in told:
            yield Message(f"{entry} {mark}", text)


def _occasions(news: JobNews, settings: NotifySettings, now: float) -> Iterator[tuple[str, str, str]]:
    """Yield occasion, mark and text of what may be told now."""
    progress, name = news.progress, f"{news.document.namespace}/{news.document.job}"
    if progress is not None and progress.phase.final:
        failed = progress.phase is Phase.FAILED
        yield "failure" if failed else "end", progress.end_mark, f"{name} {_end(progress)}{_linked(news)}"
        return
    waited_s = now - news.active_at
    if news.document.spec.suspend or waited_s < settings.wait_seconds:
        return
    admitted = progress is not None and progress.admitted
    step = progress.step if progress is not None else 0
    what = "has finished no step" if admitted else "waits for admission and has finished no step"
    why = "" if progress is None else f". {progress.reason}: {progress.message}"
    text = f"{name} {what} for {_minutes(waited_s)} ({step} of {news.document.spec.training.steps} steps){why}"
    yield "wait", f"wait {step} {'admitted' if admitted else 'queued'}", f"{text}{_linked(news)}"


def _end(progress: Progress) -> str:
    if progress.phase is Phase.FAILED:
        return f"has failed after {progress.step} of {progress.steps} steps. {progress.reason}: {progress.message}"
    before, last = progress.eval_before, progress.eval_last
    rewards = "" if before is None or last is None else f", held-out reward {before:.3f} before and {last:.3f} now"
    return f"has succeeded: {progress.step} of {progress.steps} steps{rewards}"


def _linked(news: JobNews) -> str:
    return "".join(f"\n{link}" for link in news.links)


def _minutes(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"


def body_of(text: str) -> bytes:
    """Return the JSON of a message in Slack's form."""
    escaped = "".join(_ESCAPES.get(letter, letter) for letter in text[:_LONGEST_TEXT])
    return json.dumps({"text": escaped}).encode()


Post = Callable[[str, str], None]
"""Post a text to a URL. Raises WebhookFailed."""


def post(url: str, text: str) -> None:
    """Post a text. Raises WebhookFailed, whose text does not have the URL."""
    try:
        post_json(url, body_of(text), TIMEOUT_S)
    except HTTPError as error:
        error.close()
        raise WebhookFailed(f"the webhook answered with status {error.code}") from None
    except URLError as error:
        reason = error.reason
        text = reason.strerror if isinstance(reason, OSError) and reason.strerror else type(reason).__name__
        raise WebhookFailed(f"the webhook cannot be reached: {text}") from None
    except (OSError, HTTPException, ValueError) as error:  # their texts may have the URL
        raise WebhookFailed(f"the webhook cannot be reached: {type(error).__name__}") from None
