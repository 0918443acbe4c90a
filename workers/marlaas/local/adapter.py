"""Fetch a published adapter from the blob store into a PEFT folder."""

import json
import shutil
from pathlib import Path

from marlaas.adapter_folder import CONFIG, plain_files, write_adapter
from marlaas.local.folder import replace_folder, translated
from marlaas.models.chosen_template import choose
from marlaas_api.blobs import Blobs
from marlaas_api.errors import InvalidInput
from marlaas_api.messages import Manifest, PoolDocument
from marlaas_api.messages.job_spec import ChatTemplateSettings

TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "tokenizer.model"),
    *("vocab.json", "merges.txt", "chat_template.jinja", "chat_template.json"),
)
"""Files of a model's folder that `AutoTokenizer` reads."""


async def fetch(
    blobs: Blobs,
    manifest: Manifest,
    target: Path,
    pool: PoolDocument | None = None,
    template: ChatTemplateSettings | None = None,
) -> None:
    """Write the adapter's files as a folder, completely or not at all. Raises InvalidInput, and the errors of `Blobs.fetch`.

    pool: its base model's name and tokenizer are added, so that PEFT, transformers and vLLM open the folder alone.
    template: of the job; the tokenizer gets it.
    """
    partial = target.with_name(f".{target.name}.partial")
    with translated(target):
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    for name, ref in manifest.files.items():
        await blobs.fetch(ref, partial / name)
    if pool is not None:
        with translated(target):
            complete(partial, pool, template)
    replace_folder(partial, target)


def complete(folder: Path, pool: PoolDocument, template: ChatTemplateSettings | None = None) -> None:
    """Write the base model's name into an adapter's configuration, as loaders need it, and its tokenizer beside it.

    The name is the hub's id and revision, or the model's folder on this machine. The tokenizer has the chat template that the job has
    sampled with, and its variables as defaults, because loaders pass none.
    """
    hub = pool.spec.model.hub
    config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    config["base_model_name_or_path"] = hub.id if hub is not None else str(Path(pool.model_path).absolute())
    config["revision"] = hub.revision if hub is not None else None
    (folder / CONFIG).write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    for name in TOKENIZER_FILES:
        if (Path(pool.model_path) / name).is_file():
            shutil.copyfile(Path(pool.model_path) / name, folder / name)
    chosen = choose((template or ChatTemplateSettings()).over(pool.spec.chat_template), Path(pool.model_path))
    if chosen.with_kwargs is not None and (chosen.kwargs or not chosen.is_own):
        (folder / "chat_template.jinja").write_text(chosen.with_kwargs, encoding="utf-8")


def export(adapter: Path, path: str, part: str) -> None:
    """Copy the adapter to the job's export path, or to its subfolder `part` if the job has several agents; all files or none.

    Raises:
        InvalidInput: the path cannot be written, or holds something else, which is left unchanged.
    """
    target = (Path(path).expanduser() / part).resolve()
    try:
        write_adapter(plain_files(adapter), target)
    except InvalidInput as error:
        text = f"spec.export.path: the trained adapter is in {adapter} and cannot be copied to {target}: {error}"
        raise InvalidInput(text) from error
