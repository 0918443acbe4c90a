"""The tokenizers of a replica: the pool's, and one for each other chat template that a job of the pool chooses."""

import asyncio
from collections.abc import Collection, Iterable

from marlaas_api.errors import InvalidInput
from marlaas_api.messages import JobDocument
from marlaas_api.messages.job_spec import ChatTemplateSettings
from marlaas_worker.rollout.conversation import NoChatTemplate
from marlaas_worker.rollout.templates import EndingTokenizer

_NONE = ChatTemplateSettings()


class Tokenizers:
    """Tokenizers by chat template. All have the same vocabulary. A tokenizer is dropped when no job uses its template.

    pool: the tokenizer with the pool's template.
    """

    def __init__(self, pool: EndingTokenizer) -> None:
        self.pool = pool
        self._made: dict[ChatTemplateSettings, EndingTokenizer] = {}

    def __len__(self) -> int:
        return 1 + len(self._made)

    async def of(self, document: JobDocument) -> EndingTokenizer:
        """Return the tokenizer with a job's chat template; make it if there is none. Raises NoChatTemplate if the template is missing or refused."""
        settings = document.spec.rollout.chat_template
        if settings == _NONE:
            return self.pool
        if (known := self._made.get(settings)) is not None:
            return known
        try:
            made = await asyncio.to_thread(self.pool.for_job, settings)
        except InvalidInput as error:
            raise NoChatTemplate(f"chatTemplate: {error}") from error
        return self._made.setdefault(settings, made)

    async def vocabulary(self) -> str:
        """Return the digest of the vocabulary that all these tokenizers share (`EndingTokenizer.vocabulary`)."""
        return await asyncio.to_thread(lambda: self.pool.vocabulary)

    def further_ends(self, tokenizer: EndingTokenizer) -> frozenset[int]:
        """Return the end tokens of a job's tokenizer that the pool's lacks. Requests must name them: the engine does not know them."""
        return tokenizer.end_ids - self.pool.end_ids

    def keep(self, documents: Iterable[JobDocument]) -> None:
        """Drop the tokenizers that none of these jobs uses."""
        used: Collection[ChatTemplateSettings] = {one.spec.rollout.chat_template for one in documents}
        self._made = {settings: one for settings, one in self._made.items() if settings in used}
