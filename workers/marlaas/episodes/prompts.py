"""The text of recorded prompts, as the model read them: decoded from their token ids with the base model's tokenizer."""

from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from marlaas_api.errors import InvalidInput


class PromptTexts:
    """Decodes prompts. Imports transformers and loads each tokenizer when it is first needed, which takes seconds.

    Args:
        models: folder of the base model by job and agent.
    """

    def __init__(self, models: Mapping[tuple[str, str], Path]) -> None:
        self._models = models

    def text(self, job: str, agent: str, ids: Sequence[int]) -> str:
        """Return the text of ids, special tokens included. Raises InvalidInput if the tokenizer cannot be loaded."""
        tokenizer = _tokenizer(self._models[job, agent])
        return str(tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))


@cache
def _tokenizer(folder: Path) -> Any:
    try:
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except ImportError as error:
        raise InvalidInput(f"--prompts needs the Python package {error.name}: pip install 'marlaas[worker]'") from error
    except (OSError, ValueError) as error:
        raise InvalidInput(f"--prompts needs the tokenizer of the base model, in {folder}: {error}") from error
