"""Replaces vLLM's CPU kernels by `adapter_groups`; installed by `vllm_extension` in vLLM's worker processes."""

from typing import Any

import torch
from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU

from marlaas_worker.rollout.adapter_groups import Groups, add_adapters, group_rows


class GroupedAdapters(PunicaWrapperCPU):  # type: ignore[misc]
    """vLLM's wrapper for linear layers, with rows grouped by slot once per forward pass."""

    _groups: Groups = ()

    def update_metadata(self, *arguments: Any, **options: Any) -> None:
        super().update_metadata(*arguments, **options)
        self._groups = group_rows(self.token_lora_indices)

    def add_lora_linear(
        self,
        y: torch.Tensor,
        x: torch.Tensor,
        lora_a_stacked: tuple[torch.Tensor, ...],
        lora_b_stacked: tuple[torch.Tensor, ...],
        *_: Any,
        **__: Any,
    ) -> None:
        """Add the adapters' outputs to `y`, in place. vLLM's scale is ignored: it is always 1, since B is already scaled."""
        add_adapters(y.view(-1, y.shape[-1]), x.view(-1, x.shape[-1]), self._groups, lora_a_stacked, lora_b_stacked)
