"""Adapter files, and the tensor digest on which a trainer and an engine must agree.

The files are a plain PEFT folder; equal tensors give equal bytes.
The digest covers the tensors in an engine's slot *after* loading: A in the engine's dtype, and B in the
engine's dtype times alpha / rank (vLLM 0.32, `lora/lora_weights.py`, `optimize`).
This module imports neither peft nor vllm and knows no model; it identifies layers by module name only.

This module writes tensors in the safetensors format, with the same bytes as the library. The library copies every tensor twice and compares the
addresses of all. This takes several times as long as one copy of an adapter's tensors. Reading is left to the library.
"""

import hashlib
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_safetensors

from marlaas_api.errors import Permanent
from marlaas_worker.peft_config import left_out, unsupported_fields


def choose_dtype(wanted: str, gpu: bool) -> str:
    """Return the name of the dtype to compute in: `wanted`, or for `auto` bfloat16 on a GPU and float32 on a CPU.

    On a CPU, float32 is as fast and agrees with the trainer to 1e-6 (bench/rollout_engine.py). gpu: whether a GPU computes.
    """
    if wanted != "auto":
        return wanted
    return "bfloat16" if gpu else "float32"


TENSORS_FILE = "adapter_model.safetensors"
CONFIG_FILE = "adapter_config.json"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

Kind = Literal["A", "B"]
Tensors = Mapping[str, torch.Tensor]

_PREFIX = "base_model.model."
_SUFFIXES: dict[str, Kind] = {".lora_A.weight": "A", ".lora_B.weight": "B"}
_FIXED = {
    "peft_type": "LORA",
    "task_type": "CAUSAL_LM",
    "bias": "none",
    "lora_dropout": 0.0,
    "fan_in_fan_out": False,
    "inference_mode": True,
    "init_lora_weights": True,
    "modules_to_save": None,
    "use_rslora": False,
    "use_dora": False,
    "rank_pattern": {},
    "alpha_pattern": {},
}


class AdapterInvalid(Permanent):
    """The tensors or files are not an adapter that MARLaaS can serve; the message names the tensor or file and the fault."""


@dataclass(frozen=True, slots=True)
class AdapterConfig:
    """Settings of an adapter, the same for all its modules.

    Name and revision do not prove the base model's identity; `calibration.fingerprint` does.

    Attributes:
        rank: number of rows of A and columns of B.
        alpha: numerator of the scaling, alpha / rank.
        base_model: name by which loaders (AutoPeft, vLLM) find the base model; empty if unknown.
        revision: revision of the base model's repository; None if unknown.
    """

    rank: int
    alpha: int
    base_model: str = ""
    revision: str | None = None

    @property
    def scaling(self) -> float:
        """Factor applied to B @ A."""
        return self.alpha / self.rank


def tensor_name(module: str, kind: Kind) -> str:
    """Return a tensor's name in PEFT's file; `module` is the model's own layer name (`model.layers.0.self_attn.q_proj`)."""
    return f"{_PREFIX}{module}.lora_{kind}.weight"


def parse_name(name: str) -> tuple[str, Kind]:
    """Return the module and kind of a tensor named as in PEFT's file. Raises AdapterInvalid."""
    for suffix, kind in _SUFFIXES.items():
        if name.startswith(_PREFIX) and name.endswith(suffix):
            return name[len(_PREFIX) : -len(suffix)], kind
    raise AdapterInvalid(f"tensor {name!r} is not a LoRA matrix in PEFT's layout")


def write_adapter(tensors: Tensors, config: AdapterConfig) -> dict[str, bytes]:
    """Return the files of a PEFT folder by name; equal tensors give equal bytes.

    Args:
        tensors: A [rank, in] and B [out, rank] of every adapted module, under `tensor_name`.

    Raises:
        AdapterInvalid: the tensors do not form an adapter, or hold NaN or infinity.
    """
    check_adapter(tensors, config)
    plain = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    targets = sorted({parse_name(name)[0].rsplit(".", 1)[-1] for name in tensors})
    fields = {**_FIXED, "base_model_name_or_path": config.base_model, "r": config.rank, "lora_alpha": config.alpha}
    fields |= {"revision": config.revision} if config.revision else {}
    document = json.dumps({**fields, "target_modules": targets}, indent=2, sort_keys=True) + "\n"
    return {TENSORS_FILE: write_tensors(plain, {"format": "pt"}), CONFIG_FILE: document.encode()}


def read_adapter(source: Path | Mapping[str, bytes]) -> tuple[dict[str, torch.Tensor], AdapterConfig]:
    """Return the tensors, by PEFT's names, and the settings of an adapter. source: a PEFT folder, or the contents of its files by name.

    Raises AdapterInvalid if a file is missing, damaged, or not plain LoRA.
    """
    fields = _read_fields(_file(source, CONFIG_FILE))
    config = _config(fields)
    try:
        tensors: dict[str, torch.Tensor] = load_safetensors(_file(source, TENSORS_FILE))
    except SafetensorError as error:
        raise AdapterInvalid(f"{TENSORS_FILE} is damaged: {error}") from error
    check_adapter(tensors, config)
    ignored = [name for name in tensors if left_out(parse_name(name)[0], fields.get("target_modules"))]
    if ignored:
        raise AdapterInvalid(
            f"{TENSORS_FILE} has {ignored[0]!r}, which target_modules of {CONFIG_FILE} does not name, so PEFT ignores it; "
            "name its layer there or remove its tensors"
        )
    return tensors, config


def read_config(folder: Path) -> AdapterConfig:
    """Read only the configuration of a PEFT folder. Raises AdapterInvalid."""
    return _config(_read_fields(_file(folder, CONFIG_FILE)))


def check_adapter(tensors: Tensors, config: AdapterConfig) -> None:
    """Raise AdapterInvalid unless every module has a finite A [rank, in] and B [out, rank]."""
    if not tensors:
        raise AdapterInvalid("an adapter without tensors")
    for name, tensor in tensors.items():
        module, kind = parse_name(name)
        if tensor_name(module, "B" if kind == "A" else "A") not in tensors:
            raise AdapterInvalid(f"module {module!r} has lora_{kind} only")
        if tensor.dim() != 2 or tensor.shape[0 if kind == "A" else 1] != config.rank:
            raise AdapterInvalid(
                f"tensor {name!r} has shape {tuple(tensor.shape)}, which does not fit rank {config.rank}"
            )
        if not _is_finite(tensor):
            raise AdapterInvalid(f"tensor {name!r} holds values that are not finite")


def _is_finite(tensor: torch.Tensor) -> bool:
    """Return whether all values are finite. A finite sum proves it in one pass; if the sum overflows, each value is checked."""
    return math.isfinite(float(tensor.sum())) or bool(torch.isfinite(tensor).all())


def has_effect(tensors: Tensors) -> bool:
    """Return whether any B is non-zero. An adapter without effect is valid only as version 0."""
    return any(bool(tensor.any()) for name, tensor in tensors.items() if parse_name(name)[1] == "B")


def tensor_digest(tensors: Tensors, scaling: float, dtype: str) -> str:
    """Return the digest (`slot_digest`) that the slot of an engine must have after it has loaded these tensors.

    Args:
        scaling: `AdapterConfig.scaling`.
        dtype: name of the dtype in which the engine computes.
    """
    return slot_digest(as_held(tensors, scaling, dtype))


def as_held(tensors: Tensors, scaling: float, dtype: str) -> Iterator[tuple[str, Kind, torch.Tensor]]:
    """Yield (module, kind, matrix) of an adapter as they are in the slot of an engine; arguments as for `tensor_digest`.

    The matrices are in `dtype`, and B is multiplied by the scaling.
    """
    for name, tensor in tensors.items():
        module, kind = parse_name(name)
        held = tensor.detach().to(device="cpu", dtype=DTYPES[dtype])
        yield module, kind, held if kind == "A" or scaling == 1 else held * scaling


def tensor_digests(tensors: Tensors, scaling: float) -> dict[str, str]:
    """Return the digests (`tensor_digest`) for all dtypes in which an engine may compute, by the dtype's name. scaling: `AdapterConfig.scaling`."""
    matrices = [(*parse_name(name), tensor.shape) for name, tensor in tensors.items()]
    flat = torch.cat([tensor.detach().cpu().reshape(-1) for tensor in tensors.values()])
    sizes = [tensor.numel() for tensor in tensors.values()]
    digests = {}
    for name, dtype in DTYPES.items():  # one conversion for all matrices
        plain = flat.to(dtype)
        scaled = plain if scaling == 1 else plain * scaling
        pairs = zip(matrices, torch.split_with_sizes(plain, sizes), torch.split_with_sizes(scaled, sizes), strict=True)
        digests[name] = slot_digest(
            (module, kind, (a if kind == "A" else b).view(shape)) for (module, kind, shape), a, b in pairs
        )
    return digests


def slot_digest(held: Iterable[tuple[str, Kind, torch.Tensor]]) -> str:
    """Return the sha256 (hex) over (module, kind, dtype, shape, bytes) of all matrices, sorted by module and kind.

    The tensors must be in the form in which the engine computes with them. Modules whose A and B are both zero
    are left out, because a slot holds the same zeros for a module that the adapter lacks.
    """
    pairs: dict[str, dict[Kind, torch.Tensor]] = {}
    for module, kind, tensor in held:
        pairs.setdefault(module, {})[kind] = tensor
    digest = hashlib.sha256()
    for module, pair in sorted(pairs.items()):
        if any(bool(tensor.any()) for tensor in pair.values()):
            for kind, tensor in sorted(pair.items()):
                digest.update(f"{module}\0{kind}\0{tensor.dtype}\0{tuple(tensor.shape)}\0".encode())
                digest.update(_bytes_of(tensor).data)
    return digest.hexdigest()


def _file(source: Path | Mapping[str, bytes], name: str) -> bytes:
    try:
        return (source / name).read_bytes() if isinstance(source, Path) else source[name]
    except (OSError, KeyError) as error:
        raise AdapterInvalid(f"no {name} in the adapter: {error}") from error


def _read_fields(data: bytes) -> dict[str, Any]:
    try:
        fields = json.loads(data)
    except ValueError as error:
        raise AdapterInvalid(f"{CONFIG_FILE} cannot be read: {error!r}") from error
    if not isinstance(fields, dict):
        raise AdapterInvalid(f"{CONFIG_FILE} cannot be read: it holds no mapping")
    return fields


def _config(fields: Mapping[str, Any]) -> AdapterConfig:
    unsupported = "; ".join(unsupported_fields(fields))
    if unsupported:
        raise AdapterInvalid(f"{CONFIG_FILE} asks for more than plain LoRA: {unsupported}")
    try:
        rank, alpha = int(fields["r"]), float(fields["lora_alpha"])
    except (ValueError, KeyError, TypeError) as error:
        raise AdapterInvalid(f"{CONFIG_FILE} cannot be read: {error!r}") from error
    if rank < 1 or not math.isfinite(alpha) or not alpha.is_integer():
        raise AdapterInvalid(
            f"{CONFIG_FILE} has rank {rank} and alpha {alpha}; both must be whole numbers, rank from 1"
        )
    base_model, revision = fields.get("base_model_name_or_path") or "", fields.get("revision")
    return AdapterConfig(rank, int(alpha), str(base_model), str(revision) if revision else None)


# name in the header, and rank in the order of the file: the library writes the widest dtypes first
_HEADER_DTYPES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.uint8: "U8"}
_FILE_ORDER = {dtype: place for place, dtype in enumerate((torch.float32, torch.bfloat16, torch.float16, torch.uint8))}
_ALIGNMENT = 8


def write_tensors(tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str] | None = None) -> bytes:
    """Return the bytes of a file with these tensors, by name; equal tensors give equal bytes, in whatever order they come.

    metadata: texts for the file's header; None: none.

    Raises:
        KeyError: a dtype other than float32, bfloat16, float16 and uint8.
    """
    ordered = sorted(tensors.items(), key=lambda item: (_FILE_ORDER[item[1].dtype], item[0]))
    header: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    buffers, end = [], 0
    for name, tensor in ordered:
        buffers.append(_bytes_of(tensor))
        begin, end = end, end + buffers[-1].nbytes
        shape = list(tensor.shape)
        header[name] = {"dtype": _HEADER_DTYPES[tensor.dtype], "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return b"".join((len(text).to_bytes(8, "little"), text, *(buffer.data for buffer in buffers)))


def _bytes_of(tensor: torch.Tensor) -> npt.NDArray[np.uint8]:
    """Return a tensor's bytes in row-major order, without a copy if it is contiguous and in host memory."""
    found: npt.NDArray[np.uint8] = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return found
