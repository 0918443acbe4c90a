"""The chart on a real cluster: it comes up in a namespace of the restricted level and tests itself."""

from marlaas_e2e.platform import NAMESPACE, RELEASE


def test_helm_test_reaches_the_api_server_and_the_bus(platform):
    platform.cluster.helm("test", RELEASE, "--namespace", NAMESPACE)
