"""`patient.py …` in the place of `python -m marlaas_operator …`: the operator as it is, but that it waits longer for the bus and the first word on it."""

import sys

import marlaas_operator.__main__ as entry
from marlaas_operator.policies import status_summary

status_summary.FIRST_WORD_S = 60.0
status_summary.BUS_PATIENCE_S = 60.0

sys.exit(entry.main())
