"""Everything that crosses a process boundary: kinds, job documents, messages, subjects, names, and the bus and blob gateways.

The control plane and the data plane share only this package. It imports neither Kubernetes nor torch.
"""
