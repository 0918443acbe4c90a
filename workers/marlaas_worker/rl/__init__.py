"""Pure mathematics of the learning side: numbers in, numbers out. `advantages` needs no torch, `losses` does."""
