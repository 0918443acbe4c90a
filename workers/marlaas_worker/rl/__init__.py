"""Pure mathematics of the learning side: numbers in, numbers out. `advantages` and `algorithms` need no torch, the others do."""
