"""Pictures can be looked at by a person alone; what a machine can say of them is said here."""

import re
import xml.etree.ElementTree as ET

from marlaas.plots.figure import draw, page
from marlaas.plots.series import EVAL, REWARD, Curve, JobCurves, Timeline
from marlaas.plots.shares import TenantShares

CURVES = {REWARD: Curve(((1.0, 0.2), (2.0, 0.8)), (0.1, 0.1)), EVAL: Curve(((0.0, 0.1), (2.0, 0.9)))}
JOBS = [JobCurves(f"team/<{name}>", CURVES) for name in ("first", "second")]
TIMES = [Timeline("team/<first>", 0.0, 60.0, ((0.0, 30.0),), (), None)]


def test_the_picture_names_jobs_panels_and_shares():
    text = " ".join(element.text or "" for element in ET.fromstring(draw(JOBS, TIMES, "svg")).iter())
    shares = ("engine, 50 %", "environment, 0 %", "trainer, not recorded")
    for words in ("team/<first>", "team/<second>", "reward in training", *shares):
        assert words in text


def test_the_page_is_one_file_that_loads_nothing_and_escapes_names():
    text = page("<script>", JOBS, draw(JOBS, TIMES, "svg")).decode()
    assert text.startswith("<!doctype html>")
    assert "<script>" not in text
    assert "team/&lt;first&gt;" in text
    assert "<td>0.10</td><td>0.90</td><td>0.80</td>" in text
    references = re.findall(r'(?:src|href)="([^"]*)"', text)
    assert all(reference.startswith("#") for reference in references)
    assert "@import" not in text


def test_many_jobs_are_grouped_by_tenant_and_keep_a_bounded_height():
    tenants = [f"team-{number % 4}" for number in range(96)]
    names = [f"{tenant}/job-{number}" for number, tenant in enumerate(tenants)]
    jobs = [JobCurves(name, CURVES, tenant) for name, tenant in zip(names, tenants, strict=True)]
    times = [
        Timeline(name, number, 60.0 + number, ((number, 30.0 + number),), (), None, "run", tenant)
        for number, (name, tenant) in enumerate(zip(names, tenants, strict=True))
    ]
    shares = [TenantShares(name, 2.0, 0.0, 5.0, (0.5, float("nan")), (0.25, 0.25), 0.5, 0.25) for name in tenants[:4]]
    root = ET.fromstring(draw(jobs, times, "svg", shares))
    texts = [element.text or "" for element in root.iter()]
    assert "team-3 (24 jobs)" in texts
    assert "team-0, weight 2: received 50%, entitled 25%" in texts
    assert "team-0/job-0" not in texts, "the legend names tenants, not jobs"
    assert any(text.startswith("trainer: ") and "not recorded" in text for text in texts)
    assert float(root.attrib["height"].removesuffix("pt")) < 24 * 72
