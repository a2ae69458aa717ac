# SPDX-License-Identifier: Apache-2.0
"""The agent asks to be let in at once, with the same say in the processor as before."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys

import pytest

# The numbers again, so that a slip in one of the two places is seen.
_GET = {"x86_64": 315, "aarch64": 275}.get(platform.machine())

_ASK = """
import ctypes, json, os, struct, sys, threading
from allotment.agent.latency_tuning import freeze_startup_objects
from allotment.agent.latency_tuning import request_short_slices
from allotment.agent.latency_tuning import tune_latency

def seen():
    there = ctypes.create_string_buffer(56)
    assert ctypes.CDLL(None).syscall(int(sys.argv[1]), 0, there, 56, 0) == 0
    _, policy, _, nice, _, runtime, *_ = struct.unpack("=IIQiIQQQII", there.raw)
    return [policy, nice, runtime]

os.nice(3)
found = {"before": seen()}
tune_latency()
freeze_startup_objects()
found["after"] = seen()
thread = threading.Thread(target=lambda: found.update(thread=seen()))
thread.start()
thread.join()
found["switch"] = sys.getswitchinterval()
print(json.dumps(found))
"""


_BATCH = """
import os
from allotment.agent.latency_tuning import request_short_slices
os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
print(request_short_slices(), os.sched_getscheduler(0))
"""


@pytest.mark.skipif(_GET is None, reason="no system call numbers for this machine's architecture")
def test_slices_are_short_and_nothing_else_changes_for_threads_as_well() -> None:
    command = [sys.executable, "-c", _ASK, str(_GET)]
    said = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    found = json.loads(said.stdout)
    policy, nice, before = found["before"]
    assert found["after"][:2] == [policy, nice]
    assert found["thread"] == found["after"]
    assert found["switch"] == pytest.approx(0.001)
    # Kernels before 6.12 tell nothing here, and take no notice of what is asked.
    if found["after"][2]:
        assert 0 < found["after"][2] < max(before, 1_000_000)


def test_a_thread_with_a_policy_of_its_own_keeps_it() -> None:
    said = subprocess.run(
        [sys.executable, "-c", _BATCH], capture_output=True, text=True, check=True, timeout=60
    )
    assert said.stdout.split() == ["False", str(os.SCHED_BATCH)]


@pytest.mark.parametrize("chosen", [None, "", "-event_engine_dns"])
def test_grpc_is_told_before_it_is_imported_and_whoever_knows_better_is_heard(
    chosen: str | None,
) -> None:
    environment = {key: text for key, text in os.environ.items() if key != "GRPC_EXPERIMENTS"}
    if chosen is not None:
        environment["GRPC_EXPERIMENTS"] = chosen
    say = "import os, sys, allotment.agent; print('grpc' in sys.modules,"
    say += " os.environ['GRPC_EXPERIMENTS'])"
    said = subprocess.run(
        [sys.executable, "-c", say],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
        env=environment,
    )
    meant = "-event_engine_listener" if chosen is None else chosen
    assert said.stdout.rstrip("\n") == f"False {meant}"
