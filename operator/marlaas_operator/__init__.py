"""The control plane: observe, plan, apply, write status. It is on no hot path: while it is down, training goes on.

`snapshot`, `plan`, `policies` and `manifests` are pure: values in, values out, `now` included. The rest is the shell around them.
"""
