"""`python -m marlaas_worker.prepare`: put a pool's base model on this machine's disk before its worker starts (an init container).

Reads a PoolDocument, creates, downloads or finds its model, and writes the document again with the folder as
`model_path`. The command may be repeated, and any number of pods that share a cache may run it at once. Sources
of the model:

- builtin: created or unpacked in $MARLAAS_CACHE         - path: must already exist
- pvc: a folder of the volume at $MARLAAS_MODEL_MOUNT    - hub: downloaded to $HF_HOME, or
$MARLAAS_CACHE/huggingface, with $HF_TOKEN

Exit codes: 0 done; 1 failed, try again; 2 invalid input that a person must correct. The last line on stderr
gives the reason.
"""

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from pydantic import ValidationError

from marlaas.models import resolve
from marlaas.models.cache import cache_folder
from marlaas_api.errors import InvalidInput
from marlaas_api.messages import PoolDocument
from marlaas_api.messages.pool_spec import ModelSource
from marlaas_worker.process_setup import make_home

MOUNT = "MARLAAS_MODEL_MOUNT"
_TOLD_SHARE = 0.1


def main(arguments: Sequence[str] | None = None) -> int:
    """Prepare one pool's model; return the exit code."""
    options = _parser().parse_args(arguments)
    try:
        make_home(options.out.absolute().parent)
        os.environ.setdefault("HF_HOME", str(cache_folder() / "huggingface"))
        pool = _read(options.pool_file)
        _say(f"pool {pool.name}: preparing model {_described(pool.spec.model)}")
        folder = resolve(_on_this_machine(pool.spec.model), _teller())
        _write(options.out, pool.model_copy(update={"model_path": str(folder)}))
    except InvalidInput as error:
        _say(" ".join(str(error).split()))
        return 2
    except OSError as error:
        _say(f"cannot prepare the model: {error}")
        return 1
    _say(f"pool {pool.name}: the model is in {folder}")
    return 0


def _on_this_machine(model: ModelSource) -> ModelSource:
    """Replace a model on a volume by the folder where the volume is mounted. Raises InvalidInput."""
    if model.pvc is None:
        return model
    mount = os.environ.get(MOUNT)
    if not mount:
        raise InvalidInput(f"the model lies on a PersistentVolumeClaim: set {MOUNT} to the folder where it is mounted")
    return ModelSource(path=str(Path(mount) / model.pvc.path.lstrip("/")))


def _read(path: Path) -> PoolDocument:
    try:
        return PoolDocument.model_validate_json(path.read_bytes())
    except OSError as error:
        raise InvalidInput(f"--pool-file {path}: {error.strerror}") from error
    except ValidationError as error:
        raise InvalidInput(f"--pool-file {path} is no PoolDocument: {error}") from error


def _write(path: Path, pool: PoolDocument) -> None:
    """Write to a temporary file and rename it, because a worker may start as soon as the file exists.

    The temporary name is random, so that two concurrent runs do not overwrite each other's file.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{os.urandom(4).hex()}.part")
    part.write_text(pool.model_dump_json(by_alias=True))
    part.replace(path)


def _described(model: ModelSource) -> str:
    if model.hub is not None:
        return f"{model.hub.id}@{model.hub.revision} of the hub"
    if model.pvc is not None:
        return f"{model.pvc.path} of volume {model.pvc.claim_name}"
    return model.builtin or str(model.path)


def _teller() -> Callable[[float], None]:
    """Return a callback that prints the progress at every tenth."""
    told = 0.0

    def tell(share: float) -> None:
        nonlocal told
        if share >= told + _TOLD_SHARE or share >= 1.0 > told:
            told = share
            _say(f"{share:.0%} done")

    return tell


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)  # noqa: T201 - for `kubectl logs`, and for the pod's termination message


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m marlaas_worker.prepare", description=__doc__)
    parser.add_argument("--pool-file", required=True, type=Path, metavar="FILE", help="PoolDocument as JSON")
    parser.add_argument("--out", required=True, type=Path, metavar="FILE", help="where the finished one goes")
    return parser


if __name__ == "__main__":
    sys.exit(main())
