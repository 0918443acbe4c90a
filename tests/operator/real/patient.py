"""`patient.py …` in the place of `python -m marlaas_operator …`: the operator as it is, but that it waits longer for the bus and the first word on it."""

import sys

import marlaas_operator.__main__ as entry
from marlaas_operator.policies import job_phase

job_phase.FIRST_WORD_S = 60.0
job_phase.BUS_PATIENCE_S = 60.0

sys.exit(entry.main())
