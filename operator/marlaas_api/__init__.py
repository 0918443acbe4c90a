"""What crosses a process boundary: kinds, job documents, messages, subjects, names, and the two gateways (bus, blobs).

Control plane and data plane meet here and nowhere else. This package knows neither Kubernetes nor torch.
"""
