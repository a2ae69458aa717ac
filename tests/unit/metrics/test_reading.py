# SPDX-License-Identifier: Apache-2.0
"""An agent's page of metrics, read back."""

from __future__ import annotations

from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from allotment.metrics.aliases import ALIASES
from allotment.metrics.reading import read_use
from allotment.metrics.use import ClaimUser, GpuUse, ShareUse, Use, families, write

GI = 1 << 30
NAMES = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)


def whole(pod: str, container: str, used: int) -> Use:
    """All that is read back, and no more."""
    gpu = GpuUse(
        uuid="GPU-a",
        index=3,
        model="NVIDIA A100-SXM4-80GB",
        pci_bus_id="00000000:03:00.0",
        mode="soft",
        memory_total=80 * GI,
        memory_used=40 * GI,
        memory_outside=GI,
        memory_allocated=60 * GI,
        guaranteed=0.5,
        shares=2,
        answers=True,
        is_healthy=False,
        utilization=0.25,
        temperature_c=40,
        power_mw=90_500,
        last_xid=79,
    )
    share = ShareUse(
        namespace="ml",
        pod=pod,
        container=container,
        share="0123456789ab",
        gpu="GPU-a",
        device="MIG-b",
        gpu_index=3,
        mode="mig",
        kind="latency",
        memory_used=used,
        memory_limit=20 * GI,
        memory_peak=5 * GI,
        refusals=3,
        host_bytes=GI,
        moved_bytes=7,
        guarantee=0.25,
        ceiling=1.0,
        utilization=0.125,
        gpu_ns=1_500_000_000,
        held_ns=2_000_000_000,
        processes=2,
        is_enforced=True,
    )
    user = ClaimUser(namespace="ml", claim="c", pod="train", is_only=False)
    return Use(node="n1", gpus=(gpu,), shares=(share,), claim_users=(user,), are_shares_read=True)


@settings(max_examples=examples(3 / 4))
@given(NAMES, NAMES, st.integers(0, 1 << 50))
def test_what_an_agent_writes_is_read_back(pod: str, container: str, used: int) -> None:
    one = whole(pod, container, used)
    for is_open in (False, True):
        text = write(families(one, ALIASES.values()), is_open=is_open)
        assert read_use(text) == one


def test_other_pages_have_no_use() -> None:
    assert read_use("") is None
    assert read_use("<html>not found</html>") is None
    assert read_use('up{job="x"} 1\npython_info{version="3"} 1.0\n') is None


def test_lines_that_cannot_be_read_are_skipped() -> None:
    text = (
        'allotment_use_read{what="shares"} 0\n'
        'allotment_share_memory_used_bytes{gpu="GPU-a",share="s"} NaN\n'
        'allotment_share_memory_limit_bytes{gpu="GPU-a",share="s"} much\n'
        'allotment_share_processes{gpu="GPU-a",share="s" 3\n'
        'allotment_gpu_info{gpu="GPU-a",index="-1"} 1\n'
        "allotment_claim_pod_info{} 1\n"
        'allotment_share_of_tomorrow{gpu="GPU-a",share="s"} 1\n'
        'allotment_gpu_temperature_celsius{gpu="GPU-a",sensor="new"} 1\n'
    )
    found = read_use(text)
    assert found is not None
    assert not found.are_shares_read
    assert found.shares == ()
    assert [(each.uuid, each.index, each.temperature_c) for each in found.gpus] == [
        ("GPU-a", 0, None)
    ]
