"""A figure as one self-contained HTML file that loads nothing. Pure."""

import html
import math
from collections.abc import Sequence

from marlaas.plots.series import EVAL, REWARD, WALL, Curve, JobCurves

_STYLE = """
body{font:15px/1.5 system-ui,sans-serif;color:#2b2f36;max-width:1150px;margin:2rem auto;padding:0 1rem}
table{border-collapse:collapse;margin:1rem 0}th,td{padding:.2rem 1.2rem .2rem 0;text-align:right}
th:first-child,td:first-child{text-align:left}th{color:#7a7f87;font-weight:400}svg{width:100%;height:auto}
"""
_COLUMNS = ("job", "steps", "held out, before", "held out, after", "reward, last step", "minutes")


def page(title: str, jobs: Sequence[JobCurves], svg: bytes) -> bytes:
    """Return the page: a table of the jobs' results, and the figure."""
    head = "".join(f"<th>{html.escape(column)}</th>" for column in _COLUMNS)
    rows = "".join(f"<tr>{''.join(f'<td>{html.escape(cell)}</td>' for cell in _cells(job))}</tr>" for job in jobs)
    text = svg.decode()
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{html.escape(title)}</title>'
        f"<style>{_STYLE}</style></head><body><h1>{html.escape(title)}</h1>"
        f"<table><tr>{head}</tr>{rows}</table>{text[text.index('<svg') :]}</body></html>\n"
    ).encode()


def _cells(job: JobCurves) -> list[str]:
    none = Curve(())
    evals, rewards, walls = (job.curves.get(panel, none).ys for panel in (EVAL, REWARD, WALL))
    ends = [evals[0] if evals else math.nan, evals[-1] if len(evals) > 1 else math.nan, *(rewards[-1:] or [math.nan])]
    return [job.name, str(len(rewards)), *(_number(value) for value in ends), f"{sum(walls) / 60:.1f}"]


def _number(value: float) -> str:
    return f"{value:.2f}" if math.isfinite(value) else "·"
