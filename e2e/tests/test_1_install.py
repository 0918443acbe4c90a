"""The chart on a real cluster: it comes up, tests itself, and asks for no more than the restricted level allows."""

from marlaas_e2e.platform import NAMESPACE, RELEASE, Platform


def test_helm_test_reaches_the_api_server_and_the_bus(platform: Platform) -> None:
    platform.cluster.helm("test", RELEASE, "--namespace", NAMESPACE)


def test_the_platform_runs_at_the_restricted_level(platform: Platform) -> None:
    ready = [name for name in platform.names("pods", NAMESPACE) if f"{RELEASE}-" in name]
    assert len([name for name in ready if "test" not in name]) == 3, platform.picture()


def test_explain_teaches_every_part_of_a_job_with_its_default(platform: Platform) -> None:
    text = " ".join(platform.kubectl("explain", "rljob.spec.training").split())
    for words in (
        "algorithm",
        "Number of groups (tasks) in one optimizer step (P). Default: 8.",
        "maxStaleness",
        "optimizer",
    ):
        assert words in text
