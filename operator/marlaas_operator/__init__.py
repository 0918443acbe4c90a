"""The control plane: observe, plan, apply, write status.

It is on no hot path: training continues while it is down. `snapshot`, `plan`, `policies` and `manifests` are
pure functions of values, `now` included. The other modules do the I/O.
"""
