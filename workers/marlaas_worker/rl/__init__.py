"""Pure mathematics of learning, without I/O. `advantages` and `algorithms` import no torch; the other modules do."""
