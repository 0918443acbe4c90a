"""Roles that follow a script instead of training: the real process entry, bus, blobs and signals; no model.

Called as `scripted_role.py SCRIPT ROLE …`; SCRIPT is a JSON file: `refusal`, with which one sandbox ends once; `stubborn` pool workers; and `pause_at`, the step at which the orchestrator waits until the file `go` does. It takes no step before this run's rollout and trainer are at work and the
job's sandbox has played, in this run or one before: a test that has seen a step need not wait for any of them, however slowly it starts.
"""

import asyncio
import contextlib
import itertools
import json
import sys
import tempfile
import types
from pathlib import Path

from marlaas_api import messages, subjects
from marlaas_api.bus import RevisionConflict
from marlaas_api.bus_users import read_credentials
from marlaas_api.errors import InvalidInput
from marlaas_api.wire import decode_as, encode
from marlaas_worker.__main__ import main
from marlaas_worker.role import wait_for

PACE_S = 0.05
SCRIPT = Path(sys.argv[1])
SETTINGS = json.loads(SCRIPT.read_text())
RUN = Path(tempfile.gettempdir())
"""The run's folder for temporary files: another run into the same output folder has another one, so what lies there is of this run."""
POOL_ROLES = ("rollout", "trainer")


def tell_who():
    """Leave a word of whom this process connects as; the file can be read again, as a reconnect does.

    A temporary file is left behind too, as an engine leaves its sockets.
    """
    tempfile.mkstemp()
    options = dict(itertools.pairwise(sys.argv))
    if "--creds" in options:
        who = read_credentials(Path(options["--creds"]).read_text()).name
        SCRIPT.with_name(f"{who}.connected").touch()


def at_work(role):
    return RUN / f"{role}.at-work"


async def report(context, role, pool):
    """Be a pool worker that is ready; a child of its own stands for an engine's worker."""
    tell_who()
    bucket = await context.bus.bucket(subjects.REPLICAS)
    key = subjects.replica_key(role, pool, context.name)
    engine = await asyncio.create_subprocess_exec(sys.executable, "-c", "import time; time.sleep(3600)")
    while not context.stop.is_set():
        body = {"role": role, "pool": pool, "replica": context.name, "at": context.now(), "ready": True}
        message = messages.ReplicaReport.model_validate(body)
        await bucket.put(key, encode(message))
        at_work(role).touch()
        await wait_for(context.stop, 0.2)
    if SETTINGS.get("stubborn"):
        await wait_for(asyncio.Event(), 3600)
    engine.kill()
    await engine.wait()


async def sandbox(context, document, environment_socket=None, modules=None):
    if "refusal" in SETTINGS:
        with contextlib.suppress(FileExistsError), SCRIPT.with_name("refused").open("x"):  # of two jobs' only one
            raise InvalidInput(SETTINGS["refusal"])
    tell_who()
    sys.stdout.write(f"playing {document.ref}\n")
    sys.stdout.flush()
    SCRIPT.with_name(f"{document.job}.played").touch()
    await context.stop.wait()


async def orchestrate(context):
    await context.bus.ensure()
    tell_who()
    while not context.stop.is_set():
        jobs = await (await context.bus.bucket(subjects.JOBS)).entries()
        for entry in jobs:
            await Job(context, decode_as(messages.JobDocument, entry.data)).advance()
        await wait_for(context.stop, PACE_S)


class Job:
    """One step further at each call; what is done is what the stream says."""

    def __init__(self, context, document):
        self.context, self.document, self.ref = context, document, document.ref
        self.base = {"namespace": self.ref.namespace, "job": self.ref.name, "uid": self.ref.uid}

    async def advance(self):
        subject = subjects.step(self.ref.namespace, self.ref.name, self.ref.uid, 0).rpartition(".")[0] + ".*"
        done = len(await self.context.bus.replay(subjects.STEPS, subject))
        steps = self.document.spec.training.steps
        if done == 0:
            await self.evaluate(0, 0.25)
        if done < steps and not self.paused(done):
            await self.step(done)
            done += 1
        if done >= steps:
            await self.commit(done)
            await self.evaluate(done, 0.75)
        await self.tell(done, steps)

    def paused(self, done):
        if self.document.spec.suspend or not all(at_work(role).exists() for role in POOL_ROLES):
            return True
        if not SCRIPT.with_name(f"{self.document.job}.played").exists():
            return True
        return done == SETTINGS.get("pause_at") and not SCRIPT.with_name("go").exists()

    async def step(self, number):
        figures = {"at": self.context.now(), "wall_s": PACE_S, "reward_mean": 0.1 * number, "reward_std": 0.1}
        counts = {"indices": (number,), "num_groups": 1, "num_episodes": 8, "version": number + 1}
        record = messages.StepRecord(
            **self.base, step=number, outcome=messages.StepOutcome.COMMITTED, **figures, **counts
        )
        await self.once(subjects.step(self.ref.namespace, self.ref.name, self.ref.uid, number), encode(record))

    async def evaluate(self, version, mean):
        sample = messages.EvalSample(index=0, prompt="spell hello backwards", reply=f"reply {version}", reward=mean)
        body = {"step": version, "version": version, "at": 1.0, "reward_mean": mean, "num_episodes": 1}
        record = messages.EvalRecord(**self.base, **body, samples=(sample,))
        await self.once(subjects.evaluation(self.ref.namespace, self.ref.name, self.ref.uid, version), encode(record))

    async def commit(self, version):
        blobs, folder = self.context.blobs, f"{self.ref.namespace}/{self.ref.name}"
        files = {"adapter_config.json": await blobs.put(folder, "adapter_config.json", b'{"r": 8}')}
        body = {"agent": "policy", "version": version, "step": version - 1, "parent": None, "rank": 8, "files": files}
        manifest = messages.Manifest(**self.base, **body, state=None, tensor_digests={}, probes=())
        ref = await blobs.put(folder, "manifest", encode(manifest))
        bucket = await self.context.bus.bucket(subjects.POLICY)
        record = messages.PolicyRecord(uid=self.ref.uid, version=version, manifest=ref)
        await bucket.put(subjects.policy_key(self.ref.namespace, self.ref.name, "policy"), encode(record))

    async def tell(self, done, steps):
        over = done >= steps
        body = {"generation": self.document.generation, "step": done, "steps": steps, "versions": {"policy": done}}
        phase = messages.Phase.SUSPENDED if self.document.spec.suspend else messages.Phase.RUNNING
        running = {"phase": phase, "admitted": phase is messages.Phase.RUNNING, "reason": "Admitted", "eval_last": 0.25}
        ended = {"phase": messages.Phase.SUCCEEDED, "admitted": False, "reason": "Finished"}
        ended |= {"eval_last": 0.75, "finished_at": 160.0}
        told = {"eval_before": 0.25, "faults": {"env": 1}, "started_at": 100.0}
        progress = messages.Progress(**self.base, **body, **told, **(ended if over else running))
        bucket = await self.context.bus.bucket(subjects.PROGRESS)
        await bucket.put(subjects.job_key(self.ref.namespace, self.ref.name), encode(progress))

    async def once(self, subject, data):
        try:
            await self.context.bus.publish(subject, data, expect_last=0)
        except RevisionConflict:
            return


def module(name, serve):
    fake = types.ModuleType(f"marlaas_worker.{name}.service")
    fake.serve = serve
    sys.modules[fake.__name__] = fake


if __name__ == "__main__":
    module("orchestrator", orchestrate)
    module("rollout", lambda context, pool: report(context, "rollout", pool.name))
    module("trainer", lambda context, pool: report(context, "trainer", pool.name))
    module("sandbox", sandbox)
    sys.exit(main(sys.argv[2:]))
