"""`hasty.py …` in the place of `python -m marlaas_operator …`: the operator as it is, but for how long it waits."""

import sys

import marlaas_operator.__main__ as entry
from marlaas_operator import failure_backoff, reconcile, resync, watching
from marlaas_operator.policies import job

job.FORGET_S = 20.0  # longer than the operator takes to see that the bus is away
resync.SWEEP_EVERY_S = 2.0
resync.FIRST_S = 2.0
failure_backoff.REFUSED_AGAIN_S = reconcile.REFUSED_AGAIN_S = 3.0
failure_backoff.LASTING_S = 2.0
watching._AGAIN_S = (0.1, 0.2, 0.5, 1.0)
entry._RETRY_S = 0.3

sys.exit(entry.main())
