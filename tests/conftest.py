"""Tests compute as the roles do; asked for here because MKL reads its settings once, whichever test comes first."""

from marlaas_worker.same_bits import ask_for_the_same_bits

ask_for_the_same_bits()
