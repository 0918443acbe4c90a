"""A taskset with an environment of two agents, as its author would write it for `verifiers`; it knows nothing of MARLaaS."""

import verifiers.v1 as vf

__all__ = ["ProofEnv", "Sums"]


class SumData(vf.TaskData):
    answer: str


class SumTask(vf.Task[SumData]):
    @vf.reward(weight=2.0)
    async def right(self, trace) -> float:
        return float(_last_reply(trace) == self.data.answer)

    @vf.metric
    async def length(self, trace) -> float:
        return float(len(_last_reply(trace)))


class Sums(vf.Taskset[SumTask, vf.TasksetConfig]):
    def load(self):
        for a in range(1, 10):
            for b in range(1, 10):
                yield SumTask(SumData(prompt=f"{a} + {b}?", system_prompt="Digits only.", answer=str(a + b)))


class ProofConfig(vf.EnvConfig):
    solver: vf.AgentConfig = vf.AgentConfig()
    verifier: vf.AgentConfig = vf.AgentConfig()
    drafts: int = 1


class ProofEnv(vf.Env[ProofConfig]):
    async def setup(self, agents):
        agents.verifier.trainable = False

    async def run(self, task, agents):
        for _ in range(self.config.drafts):
            draft = await agents.solver.run(task)
            question = f"{task.data.prompt} {_last_reply(draft)}: right or wrong?"
            await agents.verifier.run(vf.Task(vf.TaskData(idx=0, prompt=question)))

    async def finalize(self, task, episode):
        for draft, verdict in zip(episode.traces[::2], episode.traces[1::2], strict=True):
            verdict.record_reward("found", float((_last_reply(verdict) == "right") == (draft.reward > 0)), weight=0.5)


def _last_reply(trace) -> str:
    return str(trace.branches[-1].messages[-1].content)
