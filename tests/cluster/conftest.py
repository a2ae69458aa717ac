# SPDX-License-Identifier: Apache-2.0
"""A cluster for the tests: one for all of a run, a namespace for each test.

    def test_pod_runs(pods: Pods) -> None:
        pods.create(pod("a", container(["allot", "burn", "--help"])))
        pods.wait_phase("a", "Succeeded")

A test that breaks something for good (a component that stays stopped, a setting of the node) makes
a cluster of its own: `with Cluster(...) as own`. It takes 6 s.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol

import pytest
from testbed.api import Api, ApiError
from testbed.cluster import Cluster
from testbed.pods import Pods
from testbed.requirements import why_not
from testbed.sandbox import Process
from testbed.waiting import TestbedError

_NAMES = itertools.count(1)

# A cluster's start and pods' lives, on a machine that does other things as well.
TIMEOUT_S = 300


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Gives tests here more time than the others, unless they say so themselves."""
    for item in items:
        is_here = item.path.is_relative_to(Path(__file__).parent)
        if is_here and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(TIMEOUT_S))


@pytest.fixture(scope="session")
def testbed_machine() -> None:
    """Skips where there can be no cluster. In CI, which installs what it needs, it fails."""
    reason = why_not()
    if reason is None:
        return
    if os.environ.get("CI") and os.geteuid() == 0:
        pytest.fail(reason)
    pytest.skip(reason)


def look_at_machine() -> dict[str, object]:
    """Of the machine, what a kubelet or a container runtime would change for good."""
    settings = ("vm/overcommit_memory", "kernel/panic", "kernel/panic_on_oops")
    # Without /run, which programs of other tests write to.
    folders = [Path(name) for name in ("/etc", "/opt", "/usr/libexec", "/var/lib", "/var/log")]
    entries = {folder: sorted(folder.iterdir()) for folder in folders if folder.is_dir()}
    return {
        **{name: Path("/proc/sys", name).read_text("ascii") for name in settings},
        **{str(folder): found for folder, found in entries.items()},
        "hosts": Path("/etc/hosts").read_text("utf-8"),
        "hostname": os.uname().nodename,
    }


@pytest.fixture
def machine_state() -> Callable[[], dict[str, object]]:
    """Looks at what a kubelet or a container runtime would change of the machine for good."""
    return look_at_machine


@pytest.fixture(scope="session")
def machine_before(testbed_machine: None) -> dict[str, object]:
    """What `machine_state` tells before this run's first cluster."""
    del testbed_machine
    return look_at_machine()


_RUNNING = contextlib.ExitStack()
"""The run's cluster, if there is one."""


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Ends the run's cluster after the last test here: the other rooms' need no cluster beside."""
    is_last = nextitem is None or not nextitem.path.is_relative_to(Path(__file__).parent)
    if is_last and item.get_closest_marker("measured") is None:  # that one may be taken again
        _RUNNING.close()


@pytest.fixture(scope="session")
def cluster(
    testbed_machine: None,
    machine_before: dict[str, object],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Cluster]:
    """The run's cluster, with one node. No agent runs on it until a test starts one."""
    del testbed_machine, machine_before  # both come before it
    # There its logs outlive it: pytest keeps the folders of the last runs.
    with _RUNNING:
        yield _RUNNING.enter_context(Cluster(state=tmp_path_factory.mktemp("cluster")))


@pytest.fixture(scope="session")
def api(cluster: Cluster) -> Api:
    """The run's cluster's API, with every right."""
    return cluster.api


@pytest.fixture
def namespace(cluster: Cluster, request: pytest.FixtureRequest) -> Iterator[str]:
    """A namespace for the test; its pods are gone before the next one begins."""
    words = re.sub(r"[^a-z0-9]+", "-", request.node.name.lower()).strip("-")[:40].strip("-")
    name = cluster.make_namespace(f"{words}-{next(_NAMES)}")
    yield name
    # Whatever the test did to the cluster, what it left is asked to go.
    with contextlib.suppress(ApiError, OSError, TestbedError):
        Pods(cluster, name).delete()
        cluster.api.delete(f"/api/v1/namespaces/{name}")


@pytest.fixture
def pods(cluster: Cluster, namespace: str) -> Pods:
    """The pods of the test's namespace."""
    return Pods(cluster, namespace)


class StartAgent(Protocol):
    """What the fixture `agent` is."""

    def __call__(self, *flags: str, simulated: str = ..., **environment: str) -> Process:
        """Starts one and waits until the kubelet offers its resources."""


@pytest.fixture
def agent(cluster: Cluster, namespace: str) -> Iterator[StartAgent]:
    """Starts `allot agent` on the node, with these flags; ended after the test's pods.

    One at a time: starting a second one ends the first, and leaves its state to it.
    """
    cluster.allow_agent()
    running: list[Process] = []

    def start(*flags: str, simulated: str = "a100-80gb:2", **environment: str) -> Process:
        while running:
            running.pop().stop()
        process = cluster.start_agent(*flags, simulated=simulated, environment=environment)
        running.append(process)
        cluster.wait_agent(process)
        return process

    yield start
    try:
        Pods(cluster, namespace).delete()
    finally:
        for process in running:
            cluster.stop_agent(process)


@pytest.fixture
def own_cluster(
    testbed_machine: None, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[..., Cluster]]:
    """Makes clusters for this test alone: `own_cluster(settings=NodeSettings(has_cdi=False))`."""
    del testbed_machine
    with contextlib.ExitStack() as stack:
        yield lambda **options: stack.enter_context(
            Cluster(**{"state": tmp_path_factory.mktemp("cluster"), **options})
        )
