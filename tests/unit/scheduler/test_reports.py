# SPDX-License-Identifier: Apache-2.0
"""What is told of pods that wait: enough to know why, and no flood of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise

from allotment.kube.events import Reference
from allotment.metrics.scheduler import SchedulerMetrics
from allotment.model.clusters import ClusterPod
from allotment.model.pods import PodUid
from allotment.scheduler.reports import SchedulerReports


@dataclass
class Told:
    """In place of `Events`: what would be written, and when."""

    now: float = 0.0
    said: list[tuple[float, str, str]] = field(default_factory=list)

    def tell(self, about: Reference, *, reason: str, message: str, is_warning: bool) -> None:
        assert is_warning
        del about
        self.said.append((self.now, reason, message))


def reporting() -> tuple[SchedulerReports, Told]:
    told = Told()
    return SchedulerReports(SchedulerMetrics(), told, clock=lambda: told.now), told  # type: ignore[arg-type]


POD = ClusterPod(uid=PodUid("u"), namespace="ml", name="waits")


def test_a_pod_that_waits_all_day_in_a_busy_cluster_is_told_of_less_and_less_often() -> None:
    reports, told = reporting()
    for second in range(0, 24 * 3600, 10):
        told.now = second
        # Every pod that ends changes the amounts.
        reports.refused(
            POD, f"{second} nodes need 90Gi, have {second / 7:.1f}Gi", is_mistaken=False
        )
    times = [at for at, *_ in told.said]
    assert times[:4] == [0, 300, 900, 2100]
    assert len(times) < 32
    assert max(later - one for one, later in pairwise(times)) <= 3610


def test_why_it_waits_may_change_and_is_told_soon_and_not_with_every_change() -> None:
    reports, told = reporting()
    for second in range(0, 3600, 5):
        told.now = second
        text = "need GPUs of model A" if second % 10 else "need 90Gi"
        reports.refused(POD, text, is_mistaken=False)
    assert told.said[1][0] <= 70
    assert len(told.said) <= 61


def test_another_kind_of_trouble_is_told_at_once() -> None:
    reports, told = reporting()
    reports.refused(POD, "need 90Gi", is_mistaken=False)
    reports.unbound(POD, "n1", "the pod has changed")
    reports.refused(POD, "need 90Gi", is_mistaken=False)
    assert [reason for _, reason, _ in told.said] == ["DoesNotFit", "NotBound"]
