"""Faults for `bench.proof` inside vLLM's worker process: adapters not applied or applied wrongly, and another base model.

Beside the product's extension of vLLM's worker, never in it. Works only with the CPU's implementation of applying
adapters.
"""

from typing import Any

import torch

from marlaas_worker.rollout.adapter_groups import SlotRows
from marlaas_worker.rollout.vllm_extension import AdapterSlots


class FaultySlots(AdapterSlots):
    """Worker extension whose faults are switched on and off by name through `collective_rpc`."""

    def bench_fault(self, name: str, number: int) -> None:
        """Set the fault for later forward passes.

        `none`; `unapplied`: no adapter; `one slot`: skip one slot; `doubled`: apply twice; `one layer`: skip one layer.
        """
        manager = self.model_runner.lora_manager._adapter_manager
        layers = list(dict.fromkeys(manager.modules.values()))
        chosen = layers[number % len(layers)]
        for layer in layers:
            wrapper = layer.punica_wrapper
            if "add_lora_linear" in vars(wrapper):
                del wrapper.add_lora_linear
        wrapper = chosen.punica_wrapper
        if name != "none":
            wrapper.add_lora_linear = _Fault(name, number, chosen, wrapper.add_lora_linear, wrapper)

    def bench_base(self, seed: int, size: float) -> None:
        """Replace the base model: every matrix plus noise of `size` times its own scale; size 0 restores the original."""
        if not hasattr(self, "_bench_kept"):
            self._bench_kept = [
                (one, one.detach().clone()) for one in self.model_runner.model.parameters() if one.dim() == 2
            ]
        draw = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for one, kept in self._bench_kept:
                noise = torch.randn(kept.shape, generator=draw).mul_(size * kept.float().std())
                one.copy_((kept.float() + noise).to(kept.dtype))


class _Fault:
    """Faulty replacement of the wrapper's `add_lora_linear`."""

    def __init__(self, name: str, number: int, layer: Any, right: Any, wrapper: Any) -> None:
        self._name, self._number, self._layer, self._right, self._wrapper = name, number, layer, right, wrapper

    def __call__(self, y: torch.Tensor, x: torch.Tensor, a: Any, b: Any, *rest: Any, **options: Any) -> None:
        if self._name == "unapplied" or (self._name == "one layer" and a is self._layer.lora_a_stacked):
            return
        if self._name == "one slot":
            slot = self._number % a[0].shape[0]
            kept = self._wrapper._rows
            others = kept.slots != slot
            runs = [run for run in kept.runs if run[0] != slot]
            self._wrapper._rows = SlotRows(runs, kept.rows[others], kept.slots[others])
            self._right(y, x, a, b, *rest, **options)
            self._wrapper._rows = kept
            return
        self._right(y, x, a, b, *rest, **options)
        if self._name == "doubled":
            self._right(y, x, a, b, *rest, **options)
