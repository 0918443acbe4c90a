"""LoRA computation for vLLM on a CPU: `adapter_groups` in place of vLLM's own.

vLLM imports this module by the name that `vllm_extension` gives it.
"""

from typing import Any

import torch
from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU

from marlaas_worker.rollout.adapter_groups import SlotRows, StackedAdapters, add_adapters, group_rows, stacked_adapters
from marlaas_worker.rollout.engine_progress import Cell, attach_counters


class GroupedAdapters(PunicaWrapperCPU):  # type: ignore[misc]
    """Replaces vLLM's class that adds the adapters' outputs in linear layers. A row is one token of the batch.

    Groups rows by slot once per forward pass, not in each layer.
    """

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
        """Add the adapters' outputs for `x` [..., in] to `y` [..., sum of out], in place.

        lora_a_stacked and lora_b_stacked are as for `stacked_adapters`. vLLM's scale is ignored: it is always 1, since B is scaled already.
        """
        self._cells[Cell.LAYERS] += 1
        known = self._stacked.get(id(lora_b_stacked))
        if known is None:  # Keep the tuple, so that no other tuple can get its id.
            known = lora_b_stacked, stacked_adapters(lora_a_stacked, lora_b_stacked)
            self._stacked[id(lora_b_stacked)] = known
        add_adapters(y.view(-1, y.shape[-1]), x.view(-1, x.shape[-1]), self._rows, known[1])
