"""The plan of a pool's memory as a table."""

from collections.abc import Iterator, Mapping
from typing import Any

from marlaas.models.memory_plan import PoolPlan

_GIB = 2**30
_SUMS = ("total", "left")


def memory_lines(plan: PoolPlan) -> Iterator[str]:
    """Yield the lines of a pool's table, in GiB: a column for an engine, a trainer, and both on one card."""
    columns = _columns(plan)
    names = list(dict.fromkeys(name for parts in columns.values() for name in parts if name not in _SUMS))
    names += [name for name in _SUMS if any(name in parts for parts in columns.values())]
    width = max(map(len, names))
    yield f"  {'memory, GiB':{width}}  {'  '.join(f'{heading:>12}' for heading in columns)}"
    for name in names:
        sizes = (parts.get(name) for parts in columns.values())
        yield f"  {name:{width}}  {'  '.join(f'{_gib(size):>12}' for size in sizes)}".rstrip()
    if plan.room is not None:
        yield f"  KV cache of an engine: {plan.room}"
    yield f"  micro-batch of a trainer: {plan.micro_batches}"


def memory_facts(plan: PoolPlan) -> dict[str, Any]:
    """Return the plan for JSON, in bytes."""
    sizes = plan.micro_batches
    tokens = {"kept": sizes.kept, "recomputed": sizes.recomputed}
    return _columns(plan) | {"bytesPerToken": tokens, "activationBytes": sizes.limit}


def _columns(plan: PoolPlan) -> dict[str, Mapping[str, int]]:
    columns: dict[str, Mapping[str, int]] = {}
    for heading, worker, memory in zip(("engine", "trainer"), (plan.engine, plan.trainer), plan.memory, strict=True):
        columns[heading] = _with_sums(dict(worker.parts()), memory)
    if plan.shared is not None:
        engine, trainer = (dict(worker.parts()) for worker in plan.shared)
        both = {name: engine.get(name, 0) + trainer.get(name, 0) for name in (*engine, *trainer)}
        columns["both, a card"] = _with_sums(both, plan.memory[0])
    return columns


def _with_sums(parts: dict[str, int], memory: int | None) -> dict[str, int]:
    total = sum(parts.values())
    return parts | {"total": total} | ({} if memory is None else {"left": memory - total})


def _gib(size: int | None) -> str:
    return "" if size is None else f"{size / _GIB:,.2f}"
