"""The chart on a real cluster: it comes up in a namespace of the restricted level and tests itself."""

from marlaas_e2e.platform import NAMESPACE, RELEASE, Platform


def test_helm_test_reaches_the_api_server_and_the_bus(platform: Platform) -> None:
    platform.cluster.helm("test", RELEASE, "--namespace", NAMESPACE)
