# SPDX-License-Identifier: Apache-2.0
"""What mode `mig` refuses before a driver is asked, and settling where there is nothing to do."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from allotment.model.errors import NotInModeError
from allotment.model.modes import MIG
from allotment.model.quantities import parse_memory
from allotment.model.requests import Request
from allotment.model.shares import Injection, Share, ShareDevice, ShareId
from allotment.shares import lifecycle
from allotment.shares.folders import StateFolder
from allotment.shares.mig import allocate
from allotment.shares.placing import ShareOrder
from allotment.shares.record import RECORD, read_record, write_record

SHARE = Share(
    id=ShareId("ab12"),
    name="train",
    created=1.5,
    mode=MIG,
    devices=(ShareDevice("MIG-1", "NVIDIA H100 MIG 1g.10gb", 1 << 30, gpu="GPU-0", profile="1g"),),
    injection=Injection.NAMESPACE,
)


@pytest.mark.parametrize(
    "request_",
    [
        Request(parse_memory("1Gi"), count=2, mode=MIG),
        Request(parse_memory("1Gi"), may_oversubscribe=True, mode=MIG),
        Request(parse_memory("50%"), mode=MIG),
    ],
    ids=["several", "oversubscribed", "a part"],
)
def test_what_mig_cannot_give_makes_nothing(tmp_path: Path, request_: Request) -> None:
    folder = StateFolder(tmp_path / "state")
    with pytest.raises(NotInModeError):
        lifecycle.create(folder, ShareOrder(request_, Injection.ENVIRONMENT), ())
    assert not folder.root.exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user")
def test_slices_of_real_gpus_are_roots(tmp_path: Path) -> None:
    program = (
        "import os, sys; from pathlib import Path\n"
        "from allotment.shares import lifecycle\n"
        "from allotment.shares.mig import allocate\n"  # what that user cannot read
        "from allotment.model.errors import PrerequisiteError\n"
        "from allotment.model.quantities import parse_memory\n"
        "from allotment.model.requests import Request\n"
        "from allotment.model.shares import Injection\n"
        "from allotment.shares.folders import StateFolder\n"
        "from allotment.shares.placing import ShareOrder\n"
        "os.setuid(12345)\n"
        "order = ShareOrder(Request(parse_memory('1Gi'), mode='mig'), Injection.ENVIRONMENT)\n"
        "try:\n"
        "    lifecycle.create(StateFolder(Path(sys.argv[1])), order, ())\n"
        "except PrerequisiteError as error:\n"
        "    print(error.message)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, tmp_path / "state"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert "root's to make" in done.stdout


def test_nothing_is_asked_where_there_is_no_slice(tmp_path: Path) -> None:
    assert allocate.free_orphans(StateFolder(tmp_path)) == []
    (tmp_path / "mig" / "GPU-0").mkdir(parents=True)
    assert allocate.free_orphans(StateFolder(tmp_path)) == []


def test_a_share_of_a_slice_is_read_as_it_was_written(tmp_path: Path) -> None:
    write_record(tmp_path, SHARE)
    again = read_record(tmp_path)
    assert again == SHARE
    assert again.devices[0].driver_uuid == "GPU-0"


def test_a_record_of_an_earlier_release_has_whole_gpus(tmp_path: Path) -> None:
    write_record(tmp_path, SHARE)
    document = json.loads((tmp_path / RECORD).read_text())
    for device in document["devices"]:
        del device["gpu"], device["profile"]
    (tmp_path / RECORD).write_text(json.dumps(document))
    [device] = read_record(tmp_path).devices
    assert (device.gpu, device.profile, device.driver_uuid) == ("", "", "MIG-1")
