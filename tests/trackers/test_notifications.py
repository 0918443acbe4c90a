"""Messages to a webhook that is a real HTTP server: their form, what is shown of a failure, and each once over runs."""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
from tests.harness import a_progress, job_document
from tests.http_server import served
from tests.tables import rows

from marlaas.local.messages import RunNotifier
from marlaas.notifications import WebhookFailed, post, require_urls
from marlaas_api.errors import InvalidInput

ENTRY = {"webhook": {"secretRef": {"name": "slack", "key": "url"}}, "waitSeconds": 60}


@dataclass
class Receiver:
    """What was posted, and the status of the next answers."""

    url: str = ""
    status: int = 200
    got: list[tuple[str, str, object]] = field(default_factory=list)


@pytest.fixture
def receiver(monkeypatch) -> Iterator[Receiver]:
    made = Receiver()

    def answer(request, body):
        made.got.append((request.command, request.headers["Content-Type"], json.loads(body)))
        return made.status, b""

    with served(answer) as url:
        made.url = f"{url}/services/hunter2"
        monkeypatch.setenv("MARLAAS_WEBHOOK_1", made.url)
        yield made


def test_a_message_is_json_in_slacks_form_and_mentions_nobody(receiver):
    post(receiver.url, "a & b <!channel>")
    assert receiver.got == [("POST", "application/json", {"text": "a &amp; b &lt;!channel&gt;"})]


@pytest.mark.parametrize(("status", "end", "words"), rows(__file__, "refusals"))
def test_a_failure_is_told_without_the_address(receiver, status, end, words):
    receiver.status = status
    with pytest.raises(WebhookFailed, match=words) as failed:
        post(f"{receiver.url}{end}" if status else f"http://127.0.0.1:1/{end}", "text")
    assert "hunter2" not in str(failed.value)
    assert failed.value.__cause__ is None


async def test_a_run_tells_each_message_once_over_restarts_and_notes_a_webhook_that_fails_once(receiver, tmp_path):
    document = job_document(spec={"training": {"steps": 4}, "export": {"notify": [ENTRY, {**ENTRY, "when": ["end"]}]}})
    notes: list[str] = []
    clock = [1000.0]
    for step, waited_s in ((1, 10), (1, 70), (1, 200), (2, 10), (2, 70)):
        notifier = RunNotifier(tmp_path / "told", notes.append, now=lambda: clock[0])
        progress = a_progress(document, admitted=True, step=step, steps=4, reason="Training", message="it plays")
        receiver.status = 503 if waited_s == 200 else 200
        await notifier.tell([document], {document.ref.key: progress})
        clock[0] += waited_s
        await notifier.tell([document], {document.ref.key: progress})
    receiver.status = 503
    ended = a_progress(document, phase="Failed", step=2, steps=4, reason="TooManyFaults", message="boom")
    for _ in range(3):
        await notifier.tell([document], {document.ref.key: ended})
        receiver.status = 200
    told = [body["text"] for _, _, body in receiver.got]
    assert [text.split(" (")[0] for text in told] == [
        "team-a/sums has finished no step for 70 s",
        "team-a/sums has finished no step for 70 s",
        *["team-a/sums has failed after 2 of 4 steps. TooManyFaults: boom"] * 2,
    ]
    (note,) = notes
    assert note.endswith("the webhook answered with status 503 (spec.export.notify[0]); the message is tried again")


def test_a_url_that_is_missing_is_said_before_anything_starts(receiver):
    require_urls(job_document(spec={"export": {"notify": [ENTRY]}}))
    with pytest.raises(InvalidInput, match=r"notify\[1\].*MARLAAS_WEBHOOK_2 must have an http:// or https:// URL"):
        require_urls(job_document(spec={"export": {"notify": [ENTRY, ENTRY]}}))
