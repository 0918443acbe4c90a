"""Messages of `marlaas run` to the webhooks of `export.notify`, each once, also over restarts: a file of the run has the marks of those told."""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from marlaas.notifications import JobNews, Post, due, post, url_of
from marlaas_api.errors import MarlaasError
from marlaas_api.messages import JobDocument, Progress

EVERY_S = 2.0
RETRY_S = 30.0
Jobs = tuple[Sequence[JobDocument], Mapping[str, Progress]]
"""Jobs, and their progress by key."""


@dataclass(slots=True)
class RunNotifier:
    """Tells about all jobs of a run. folder: for the marks. note: gets the failures of webhooks, each once."""

    folder: Path
    note: Callable[[str], None]
    post: Post = post
    now: Callable[[], float] = time.time
    _moved: dict[str, tuple[object, float]] = field(default_factory=dict)
    _failed: dict[tuple[str, int], float] = field(default_factory=dict)

    async def run(self, jobs: Callable[[], Jobs]) -> None:
        """Tell what is due until cancelled."""
        while True:
            await self.tell(*jobs())
            await asyncio.sleep(EVERY_S)

    async def tell(self, jobs: Sequence[JobDocument], progress: Mapping[str, Progress]) -> None:
        """Tell what is due now. A webhook that fails is tried again at a later call."""
        for job in jobs:
            news = JobNews(job, progress.get(job.ref.key), self._active_at(job, progress.get(job.ref.key)))
            for entry in range(len(job.spec.export.notify)):
                is_over = news.progress is not None and news.progress.phase.final
                if is_over or self.now() - self._failed.get((job.uid, entry), 0.0) >= RETRY_S:
                    await self._tell(news, entry)

    async def _tell(self, news: JobNews, entry: int) -> None:
        job = news.document
        for message in list(due(news, entry, self._told(job), self.now())):
            try:
                await asyncio.to_thread(self.post, url_of(entry), message.text)
            except MarlaasError as error:
                if (job.uid, entry) not in self._failed:
                    self.note(f"{job.ref}: {error} (spec.export.notify[{entry}]); the message is tried again")
                self._failed[job.uid, entry] = self.now()
                return
            self._failed.pop((job.uid, entry), None)
            self.folder.mkdir(parents=True, exist_ok=True)
            with (self.folder / job.uid).open("a") as file:
                file.write(f"{message.mark}\n")

    def _told(self, job: JobDocument) -> list[str]:
        path = self.folder / job.uid
        return path.read_text().splitlines() if path.exists() else []

    def _active_at(self, job: JobDocument, progress: Progress | None) -> float:
        """Return when the job's step, admission or evaluation last changed, as far as this process has seen it."""
        state = None if progress is None else (progress.step, progress.admitted, progress.eval_last)
        if job.uid not in self._moved or self._moved[job.uid][0] != state:
            self._moved[job.uid] = (state, self.now())
        return self._moved[job.uid][1]
