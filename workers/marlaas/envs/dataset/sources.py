"""The sources of a data set, and the files of each: those that the manifest names, objects of a bucket, or a split of the hub's data set."""

from marlaas.envs.dataset.files import DataFile, find
from marlaas.envs.dataset.hub import split_files
from marlaas.envs.dataset.s3 import fetched
from marlaas.envs.dataset.settings import Settings, Source


def sources_of(settings: Settings) -> list[tuple[Source, str]]:
    """Return the sources of a data set, with the argument that names each."""
    held_out = settings.held_out
    found = [(settings.source, "source")]
    if held_out is not None and held_out.files is not None:
        found.append((Source(files=held_out.files), "held_out"))
    elif held_out is not None and held_out.s3 is not None:
        found.append((Source(s3=held_out.s3), "held_out"))
    elif held_out is not None and held_out.split is not None:
        found.append((settings.source.model_copy(update={"split": held_out.split}), "held_out"))
    return found


def files_of(source: Source, *loc: str, is_known: bool = False) -> tuple[DataFile, ...]:
    """Return the files of a source. is_known: they have been fetched on this machine, so no bucket is asked. Raises InvalidArgument."""
    if source.s3 is not None:
        return fetched(source.s3, *loc, "s3", is_known=is_known)
    if source.files is not None:
        return find(source.files, *loc, "files")
    return find(split_files(source, *loc)[0], *loc)
