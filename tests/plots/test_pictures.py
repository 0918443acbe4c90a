"""Pictures can be looked at by a person alone; what a machine can say of them is said here."""

import re
import xml.etree.ElementTree as ET

import pytest

from marlaas.plots.figure import draw, page
from marlaas.plots.series import EVAL, REWARD, Curve, JobCurves, Timeline

CURVES = {REWARD: Curve(((1.0, 0.2), (2.0, 0.8)), (0.1, 0.1)), EVAL: Curve(((0.0, 0.1), (2.0, 0.9)))}
JOBS = [JobCurves(f"team/<{name}>", CURVES) for name in ("first", "second")]
TIMES = [Timeline("team/<first>", 0.0, 60.0, ((0.0, 30.0),), (), None)]


@pytest.mark.parametrize("times", [[], TIMES])
@pytest.mark.parametrize("jobs", [JOBS, [JobCurves("nothing yet")]])
def test_a_png_is_drawn_of_whatever_there_is(jobs, times):
    assert draw(jobs, times).startswith(b"\x89PNG\r\n\x1a\n")


def test_the_same_runs_give_the_same_picture():
    assert draw(JOBS, TIMES, "svg") == draw(JOBS, TIMES, "svg")


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
