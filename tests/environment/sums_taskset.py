"""A taskset as its author would write it for `verifiers`; it knows nothing of MARLaaS."""

import verifiers.v1 as vf

__all__ = ["Sums"]


class SumData(vf.TaskData):
    answer: str


class SumTask(vf.Task[SumData]):
    @vf.reward(weight=2.0)
    async def right(self, trace) -> float:
        return float(_last_reply(trace) == self.data.answer)

    @vf.metric
    async def length(self, trace) -> float:
        return float(len(_last_reply(trace)))


class SumsConfig(vf.TasksetConfig):
    most: int = 9


class Sums(vf.Taskset[SumTask, SumsConfig]):
    def load(self):
        for a in range(1, self.config.most + 1):
            for b in range(1, self.config.most + 1):
                yield SumTask(SumData(prompt=f"{a} + {b}?", system_prompt="Digits only.", answer=str(a + b)))


def _last_reply(trace) -> str:
    return str(trace.branches[-1].messages[-1].content)
