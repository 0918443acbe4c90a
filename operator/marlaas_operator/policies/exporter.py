"""The exporter of a job, which reports it to trackers and webhooks and uploads its adapters: when it runs, and what the job's status says of it.

It runs from the job's first admission on; with `export.notify` already while the job is queued, and with nothing but uploads once it has
succeeded. After the end, or once the job is suspended, it stays until it has reported everything, at most `END_S` (`UPLOAD_S` with uploads). What it does never affects the job: its actions are apart
from those of the sandbox (`Plan.aside`), and its pods are not counted among them.
"""

from urllib.parse import urlsplit

from marlaas_api.last_words import visible
from marlaas_api.messages import DestinationReport, ExportReport, Phase, Progress
from marlaas_api.messages.job_spec import ExportSettings
from marlaas_api.reasons import Reason
from marlaas_operator.installation import Installation
from marlaas_operator.manifests.exporter import Exporter, exporter_objects, exporter_secret
from marlaas_operator.manifests.pods import exporter_name
from marlaas_operator.plan import Action
from marlaas_operator.pod_facts import first_fault, refusal_of
from marlaas_operator.policies.child_reconcile import STUCK_S, Mounted, removed, towards
from marlaas_operator.policies.conditions import ConditionState, rfc3339
from marlaas_operator.snapshot import JobSnapshot

HUB = "hub"
"""Name of the hub in a report and in the status."""
REPORTING = "Reporting"
"""Condition of a job: its trackers, webhooks and targets of uploads have what it has made so far."""
END_S = 3600.0
"""Longest time after a job's end for which its exporter tries to report the end."""
UPLOAD_S = 24 * 3600.0
"""The same if its adapters are uploaded: they are the job's result."""
CHECK_S = 600.0
_LATEST = 2.0**32
_MOST_DESTINATIONS, _LONGEST_URL, _LONGEST_ERROR = 16, 1024, 512


def wanted(snapshot: JobSnapshot, now: float) -> bool | None:
    """Return whether the job should have an exporter; None if that is not known now."""
    document, progress = snapshot.own_document, snapshot.own_progress
    if document is None or document.deleted:
        return False if snapshot.progress_known else None
    export = document.spec.export
    if progress is None:
        return bool(export.notify) if snapshot.progress_known else None
    if not export.is_reported:
        return False
    is_late = now >= (progress.finished_at or progress.at) + _patience_s(export)
    is_over = bool(progress.rest_mark) and (_has_ended(snapshot) or is_late)
    return not is_over and _has_begun(export, progress)


def _has_begun(export: ExportSettings, progress: Progress) -> bool:
    """Return whether there can be something to report."""
    if export.notify:
        return True
    return progress.started_at is not None if export.remote_trackers else progress.phase is Phase.SUCCEEDED


def _patience_s(export: ExportSettings) -> float:
    return UPLOAD_S if export.remote_uploads else END_S


def is_uploading(snapshot: JobSnapshot, now: float) -> bool:
    """Return whether the job has succeeded and its adapters may still be uploaded."""
    document, progress = snapshot.own_document, snapshot.own_progress
    if document is None or progress is None or not document.spec.export.remote_uploads:
        return False
    return progress.phase is Phase.SUCCEEDED and bool(wanted(snapshot, now))


def _has_ended(snapshot: JobSnapshot) -> bool:
    """Return whether every destination has everything of a job that has ended or is suspended."""
    report, progress = snapshot.own_report, snapshot.own_progress
    return report is not None and progress is not None and report.ended == progress.rest_mark != ""


def actions(snapshot: JobSnapshot, installation: Installation, now: float) -> tuple[Action, ...]:
    """Return the actions that create, update or delete the exporter."""
    is_wanted = wanted(snapshot, now)
    if is_wanted is None:
        return ()
    if not is_wanted:
        return removal(snapshot)
    document = snapshot.own_document
    if document is None or snapshot.exporter_credential is None or snapshot.own_pool is None:
        return ()
    progress = snapshot.own_progress
    one = Exporter(
        snapshot.meta,
        document,
        snapshot.own_pool.spec.sandbox,
        snapshot.exporter_credential,
        has_succeeded=progress is not None and progress.phase is Phase.SUCCEEDED,
    )
    secret = Mounted(exporter_secret(one, installation), snapshot.exporter_pods)
    return tuple(towards(exporter_objects(one, installation), snapshot.owned, snapshot.meta.uid, secret, now))


def removal(snapshot: JobSnapshot) -> tuple[Action, ...]:
    """Return the actions that delete the exporter."""
    return tuple(removed(snapshot, exporter_name(snapshot.meta.name), snapshot.exporter_pods))


def check_s(snapshot: JobSnapshot, now: float) -> float | None:
    """Return after how many seconds to look at the exporter again: its credential expires, and its time after the end ends."""
    if not wanted(snapshot, now):
        return None
    pods = [pod for pod in snapshot.exporter_pods if not pod.ended]
    return CHECK_S if pods and all(pod.ready for pod in pods) else STUCK_S


def trackers(snapshot: JobSnapshot) -> list[dict[str, str]]:
    """Return trackers and hub for the status, as far as the exporter has reported where they are."""
    export = snapshot.job.spec.export if snapshot.job is not None else None
    shown = (*(export.trackers if export else ()), *((HUB,) if export and export.hub else ()))
    named = {one.name: one.url for one in _destinations(snapshot.own_report) if _is_address(one.url)}
    return [{"name": name, "url": named[name]} for name in shown if name in named]


def finding(snapshot: JobSnapshot, now: float) -> ConditionState | None:
    """Return the state of the condition `Reporting`; None for a job that asks for no report, or before its exporter is due."""
    document = snapshot.own_document
    if document is None or not document.spec.export.is_reported:
        return None
    if _has_ended(snapshot):
        return ConditionState(
            REPORTING, True, Reason.REPORTING, "everything is reported, and the job rests or has ended"
        )
    report = snapshot.own_report
    failing = [one for one in _destinations(report) if one.since is not None]
    is_wanted = wanted(snapshot, now)
    is_given_up = is_wanted is False and snapshot.own_progress is not None and snapshot.own_progress.phase.final
    if failing and (is_given_up or is_wanted is not False):  # else the report is of an end that the job has left
        text = "; ".join(map(_failure, failing))
        patience_s = _patience_s(document.spec.export)
        text = f"{text}. It was given up {patience_s / 60:.0f} min after the job's end" if is_given_up else text
        return ConditionState(REPORTING, False, Reason.REPORT_DELAYED, text)
    if not is_wanted:
        return None
    if snapshot.exporter_refusal:
        return ConditionState(REPORTING, False, Reason.REPORT_DELAYED, snapshot.exporter_refusal)
    fault = first_fault(snapshot.exporter_pods) or refusal_of(
        snapshot.owned.get(("Deployment", exporter_name(snapshot.meta.name)))
    )
    if fault is not None:
        return ConditionState(REPORTING, False, Reason.REPORT_DELAYED, fault.message)
    if report is None or not any(pod.ready for pod in snapshot.exporter_pods):
        progress, volume = snapshot.own_progress, document.spec.export.volume
        volume = volume if progress is not None and progress.phase is Phase.SUCCEEDED else None
        needed = "" if volume is None else f"; it needs the PersistentVolumeClaim {volume.claim_name}"
        text = f"the pod that reports the job is starting{needed}"
        return ConditionState(REPORTING, False, Reason.EXPORTER_STARTING, text)
    if is_uploading(snapshot, now):
        targets = " and ".join(document.spec.export.remote_uploads)
        return ConditionState(REPORTING, False, Reason.UPLOADING, f"the adapters are being uploaded to {targets}")
    return ConditionState(
        REPORTING, True, Reason.REPORTING, "all destinations of spec.export have all that the job has made so far"
    )


def _destinations(report: ExportReport | None) -> tuple[DestinationReport, ...]:
    return report.destinations[:_MOST_DESTINATIONS] if report is not None else ()


def _failure(one: DestinationReport) -> str:
    known = one.since is not None and 0 <= one.since < _LATEST
    since = f" since {rfc3339(one.since or 0.0)}" if known else ""
    return f"{visible(one.name)[:63]} takes nothing{since}: {visible(one.error)[:_LONGEST_ERROR]}"


def _is_address(url: str) -> bool:
    """Whether a URL that a tenant's pod has reported may stand in the status: people click on it."""
    try:
        parts = urlsplit(url)
        is_web = parts.scheme in ("http", "https") and bool(parts.hostname) and "@" not in parts.netloc
    except ValueError:
        return False
    return is_web and len(url) <= _LONGEST_URL and url.isprintable() and " " not in url
