"""Adapters of other programs: which settings of PEFT's configuration MARLaaS computes exactly, and which base model they name.

An adapter file holds A and B only. Some settings make PEFT change the base model's weights at load, adapt more than
linear layers, or adapt some tokens only. An engine that adds B @ A to a linear layer then computes another model,
and nothing fails. Therefore every field is either known here with its values, or refused by name.
The fields are those of peft 0.21 (`LoraConfig`). Standard library only: `marlaas validate` uses it too.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any

_ANY = frozenset(
    {
        "r",
        "lora_alpha",
        "base_model_name_or_path",
        "revision",
        "peft_version",
        "auto_mapping",
        "inference_mode",
        "lora_dropout",
        "target_modules",
        "exclude_modules",
        "layers_to_transform",
        "layers_pattern",
        "megatron_core",
        "qalora_group_size",
    }
)
"""Fields whose value does not change what a loaded adapter computes.

`read_adapter` checks rank and alpha. The tensors show the adapted layers. Dropout acts in training only, and the
trainer has none. Names of libraries and group sizes count only with fields that are refused.
"""
_KNOWN: Mapping[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "task_type": (None, "CAUSAL_LM"),
    "bias": ("none",),
    "init_lora_weights": (True, False, None, "gaussian", "orthogonal"),
}
"""Fields with the values that are computed exactly. All other fields must be empty, false or zero."""
_INITIAL = (
    "kinds such as pissa, olora, corda and loftq change the base model's weights when PEFT loads the adapter; "
    "save it with PEFT's save_pretrained(…, path_initial_model_for_weight_conversion=…), which makes a plain adapter of it"
)
_WHY = {
    "peft_type": "only LoRA is served",
    "task_type": "only causal language models are trained",
    "bias": "biases of layers are not adapted",
    "init_lora_weights": _INITIAL,
    "alora_invocation_tokens": "an activated adapter acts only after these tokens, and engines apply an adapter to all tokens",
    "layer_replication": "it repeats layers of the base model",
    "trainable_token_indices": "rows of the embedding are not adapted",
    "target_parameters": "parameters that are not linear layers, such as fused experts, are not adapted",
    "use_dora": "the magnitudes of DoRA are not served",
    "use_qalora": "inputs pooled by groups are not served",
    "use_rslora": "its scaling is alpha / sqrt(rank); save it with lora_alpha multiplied by sqrt(rank) if that is a whole number",
    "rank_pattern": "all layers have one rank",
    "alpha_pattern": "all layers have one alpha",
    "modules_to_save": "whole modules are not adapted",
    "lora_bias": "biases of B are not adapted",
    "fan_in_fan_out": "it is for layers that store weights as [in, out]",
}


def unsupported_fields(fields: Mapping[str, Any]) -> Iterator[str]:
    """Yield each field of an `adapter_config.json` whose value is not computed exactly, with the reason and what to do."""
    for name, value in sorted(fields.items()):
        known = _KNOWN.get(name)
        if name in _ANY or (value in known if known is not None else not value):
            continue
        why = _WHY.get(name, "this release does not know the field")
        yield f"{name} is {_short(value)}: {why}"


def left_out(module: str, targets: object) -> bool:
    """Return whether PEFT ignores an adapter's tensors of a module, because `target_modules` does not cover the module.

    Args:
        module: name of the layer in the model.
        targets: value of `target_modules`: a list of names or name endings, a regular expression, or `all-linear`. None, an empty list: all modules.
    """
    if isinstance(targets, str):
        return targets != "all-linear" and re.fullmatch(targets, module) is None
    if not isinstance(targets, list) or not targets:
        return False
    return not any(module == target or module.endswith(f".{target}") for target in targets)


def other_base(named: str, revision: str | None, base: str, base_revision: str | None = None) -> str | None:
    """Return a sentence if an adapter names another base model than the pool's; None if they agree or it names none.

    Folders and repositories are compared by the last part of their names, ignoring case. A cached repository of the
    hub counts by its repository's name. Revisions are compared if both are known; `main` counts as unknown.

    Args:
        named: base model that the adapter names; empty: none.
        revision: of `named`; None: unknown.
        base: name of the pool's base model.
        base_revision: of `base`; None: unknown.
    """
    if not named:
        return None
    where = f"{named} (revision {revision})" if revision else named
    if _last(named) == _last(base):
        known = {one for one in (revision, base_revision) if one not in (None, "main")}
        if not (revision and base_revision) or len(known) < 2:
            return None
        base = f"{base} (revision {base_revision})"
    return (
        f"the adapter was trained on {where}, and the pool's base model is {base}: on other weights it computes something else; "
        "go on only if both names mean the same weights"
    )


def _last(name: str) -> str:
    """Return the last part of a model's name; a hub's cache has `models--OWNER--NAME/snapshots/REVISION`."""
    parts = [part for part in name.replace("\\", "/").split("/") if part]
    cached = [part for part in parts if part.startswith("models--")]
    return (cached[-1].rpartition("--")[2] if cached else parts[-1] if parts else "").lower()


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}…"
