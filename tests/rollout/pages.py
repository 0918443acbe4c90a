"""Residents, demands and plans of `marlaas_worker.rollout.paging`, for its tests."""

from marlaas_worker.rollout.paging import PageDemand, PagePlan, Resident, Urgency, plan_pages
from marlaas_worker.rollout.reload_pace import ReloadPace

NOW = 1000.0
LONG_AGO = NOW - 100


def pace_of(load_s: float = 0.02) -> ReloadPace:
    """The pace of an engine whose loads take so long, with time saved up for one re-load."""
    pace = ReloadPace()
    pace.note("first", load_s, LONG_AGO, is_reload=False)
    return pace


def plan(num_slots: int, residents: list[Resident], *demands: PageDemand, pace: ReloadPace | None = None) -> PagePlan:
    return plan_pages(num_slots, residents, demands, pace or pace_of(), NOW)


def waiting(name: str, is_reload: bool = False) -> PageDemand:
    return PageDemand(name, Urgency.WAITING, is_reload)


def idle(name: str, since: float = LONG_AGO, *, is_current: bool = True, is_strict: bool = False) -> Resident:
    return Resident(name, LONG_AGO, since, is_current=is_current, is_strict=is_strict)


def in_use(name: str, loaded_at: float = LONG_AGO, num_running: int = 1, *, is_current: bool = True) -> Resident:
    return Resident(name, loaded_at, NOW, num_running, is_current=is_current)


def used(name: str, usage: float, num_running: int = 1, num_queued: int = 0) -> Resident:
    return Resident(name, LONG_AGO, NOW, num_running, num_queued, usage=usage)
