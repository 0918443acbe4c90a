"""`variants.py hasty|patient …` in the place of `python -m marlaas_operator …`: the operator as it is, but for how long it waits."""

import sys

import marlaas_operator.__main__ as entry
from marlaas_operator import reconcile, watching, work_queue
from marlaas_operator.policies import job, job_phase

if sys.argv.pop(1) == "hasty":
    job.FORGET_S = 20.0  # longer than the operator takes to see that the bus is away
    watching.SWEEP_EVERY_S = watching.FIRST_S = 2.0
    work_queue.REFUSED_AGAIN_S = reconcile.REFUSED_AGAIN_S = 3.0
    work_queue.LASTING_S = 2.0
    watching._AGAIN_S = (0.1, 0.2, 0.5, 1.0)
    entry._RETRY_S = 0.3
else:  # the bus and the first word on it may be late
    job_phase.FIRST_WORD_S = job_phase.BUS_PATIENCE_S = 60.0

sys.exit(entry.main())
