"""A whole single-node Kubernetes in one network, mount and process namespace of its own (needs root on Linux)."""
