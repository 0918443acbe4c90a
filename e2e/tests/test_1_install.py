"""The chart on a real cluster: it comes up at the restricted level and tests itself."""

from marlaas_e2e.platform import NAMESPACE, RELEASE, Platform


def test_helm_test_reaches_the_api_server_and_the_bus(platform: Platform) -> None:
    platform.cluster.helm("test", RELEASE, "--namespace", NAMESPACE)


def test_the_platform_runs_at_the_restricted_level(platform: Platform) -> None:
    level = platform.get("namespace", NAMESPACE)["metadata"]["labels"]["pod-security.kubernetes.io/enforce"]
    pods = platform.cluster.get("pods", "-n", NAMESPACE, "-l", f"app.kubernetes.io/instance={RELEASE}")["items"]
    running = {pod["metadata"]["labels"]["app.kubernetes.io/component"] for pod in pods}
    assert level == "restricted"
    assert {"operator", "orchestrator", "nats"} <= running, platform.picture()
