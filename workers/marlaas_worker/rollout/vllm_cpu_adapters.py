"""Adapters for vLLM on a CPU: its own computation is replaced by `adapter_groups`.

vLLM imports this module by the name that `vllm_extension` gives it.
"""

from typing import Any

import torch
from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU

from marlaas_worker.rollout.adapter_groups import SlotRows, StackedAdapters, add_adapters, group_rows, stacked_adapters
from marlaas_worker.rollout.engine_progress import Cell, attach_counters


class GroupedAdapters(PunicaWrapperCPU):  # type: ignore[misc]
    """vLLM's wrapper for linear layers, with rows grouped by slot once per forward pass."""

    _rows: SlotRows

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._cells = attach_counters().cells
        self._stacked: dict[int, tuple[object, StackedAdapters]] = {}

    def update_metadata(self, *arguments: Any, **options: Any) -> None:
        super().update_metadata(*arguments, **options)
        self._rows = group_rows(self.token_lora_indices)

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
        self._cells[Cell.LAYERS] += 1
        known = self._stacked.get(id(lora_b_stacked))
        if known is None:  # The tuple is kept, so that no other one gets its id.
            known = lora_b_stacked, stacked_adapters(lora_a_stacked, lora_b_stacked)
            self._stacked[id(lora_b_stacked)] = known
        add_adapters(y.view(-1, y.shape[-1]), x.view(-1, x.shape[-1]), self._rows, known[1])
