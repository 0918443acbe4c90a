"""A real Kubernetes for tests: binaries built from source, a control plane, a single node, images.

Knows nothing of MARLaaS; the scenario tests and the fixtures of other tests use it.
"""
