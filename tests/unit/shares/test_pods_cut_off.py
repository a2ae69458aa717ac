# SPDX-License-Identifier: Apache-2.0
"""Whatever is cut off of a pod's share, the next try finishes, or tidying removes."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pod_node
import pytest
from pod_node import Node, in_force, order, owner, pair

from allotment.model.pods import ContainerKind

CHILD = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import pod_node
node = pod_node.Node(Path(sys.argv[2]))
if sys.argv[3] == "end":
    node.shares.end(pod_node.order(2).id)
else:
    node.prepare(pod_node.pair()[1])
"""


PREPARE = [
    "prepare.begun",
    "settle.changed",
    "create.placed",
    "create.drafted",
    "create.enforced",
    "create.filled",
    "create.recorded",
    "create.shown",
    "prepare.made",
    "publish.drafted",
    "publish.shown",
]
END = ["end.begun", "remove.unpublished", "remove.hidden", "remove.freed", "remove.cleared"]


def cut_off(root: Path, what: str, point: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", CHILD, str(Path(pod_node.__file__).parent), str(root), what],
        env={**os.environ, "ALLOTMENT_KILL_AT": point},
        check=False,
    )
    assert done.returncode == -signal.SIGKILL, f"it never came to {point}"


@pytest.mark.parametrize("point", PREPARE)
def test_whatever_is_cut_off_is_finished_by_the_next_try(
    tmp_path: Path, native_dir: Path, point: str
) -> None:
    assert native_dir.is_dir()
    node = Node(tmp_path)
    first = node.prepare(pair()[0])
    cut_off(tmp_path, "prepare", point)
    shown = {path: path.read_bytes() for path in node.specs() if path.suffix == ".json"}
    share = node.prepare(pair()[1])
    assert {path: path.read_bytes() for path in shown} == shown
    assert in_force(node, share) == 60
    assert in_force(node, first) == 0
    node.check()


@pytest.mark.parametrize("point", PREPARE)
def test_what_is_cut_off_and_never_tried_again_is_tidied(
    tmp_path: Path, native_dir: Path, point: str
) -> None:
    assert native_dir.is_dir()
    node = Node(tmp_path)
    node.prepare(pair()[0])
    cut_off(tmp_path, "prepare", point)
    for share in node.shares.owned():
        node.shares.end(share.id)
    node.shares.tidy()
    node.check()
    assert node.shares.owned() == ()
    assert node.specs() == []


@pytest.mark.parametrize("point", END)
def test_an_end_that_is_cut_off_is_finished(tmp_path: Path, native_dir: Path, point: str) -> None:
    assert native_dir.is_dir()
    node = Node(tmp_path)
    first, second = (node.prepare(each) for each in pair())
    cut_off(tmp_path, "end", point)
    node.shares.end(second.id)
    node.shares.tidy()
    node.check()
    assert node.shares.owned() == (first,)


def test_a_start_that_was_cut_off_is_not_in_the_way_of_another(
    tmp_path: Path, native_dir: Path
) -> None:
    """A container has a seat and no share yet; the one that gave way to it starts again."""
    assert native_dir.is_dir()
    node = Node(tmp_path)
    first = order(1, whose=owner("fetch", kind=ContainerKind.INIT, place=0), guarantee=80)
    node.prepare(first)
    cut_off(tmp_path, "prepare", "create.recorded")
    assert in_force(node, node.prepare(first)) == 80
