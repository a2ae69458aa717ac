# SPDX-License-Identifier: Apache-2.0
"""What runs in a share and outside of all, in tables: said, and never at a figure's expense."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from allotment.cli import devices as devices_command
from allotment.cli import ps as ps_command
from allotment.cli.machines import DeviceRow
from allotment.cli.tables import command_of, shortened
from allotment.ledger import DeviceUse, SeatAccount
from allotment.model.compute import Compute
from allotment.model.devices import Device
from allotment.model.pods import ContainerKind, Owner, PodUid
from allotment.model.shares import Injection, Share, ShareDevice, ShareId
from allotment.model.structs import replace
from allotment.shares.compute_view import ComputeView
from allotment.shares.status import DeviceView, LiveState, OutsideView, ShareStatus, ShareView

GI = 1 << 30
UUID = "GPU-45f0e349-d56a-059c-e064-c6df20dfdb35"
OWNER = Owner(
    uid=PodUid("1"), namespace="lab", pod="one", container="main", kind=ContainerKind.REGULAR,
    resource="allotment.dev/gpu",
)  # fmt: skip


def share_view(owner: Owner | None, command: tuple[str, ...] = (), program: str = "") -> ShareView:
    share = Share(
        id=ShareId("0123456789ab"), name="train", created=1.0, mode="soft",
        devices=(ShareDevice(UUID, "A100", GI),), injection=Injection.CDI,
        command=command, owner=owner,
    )  # fmt: skip
    return ShareView(share.id, "train", LiveState.KEPT, share, (), (), None, program=program)


@pytest.mark.parametrize(
    ("view", "text"),
    [
        (share_view(OWNER), "-"),
        (share_view(OWNER, program="python train.py"), "python train.py"),
        (share_view(None, command=("sh", "-c", "x"), program="x"), "sh -c x"),
        (share_view(None), ""),
        (share_view(None, program="python train.py"), "python train.py"),
        (share_view(None, command=("/usr/bin/train", "/data/x")), "train /data/x"),
        (share_view(OWNER, program="/opt/env/bin/python3.12 /srv/a/train.py /b"),
         "python3.12 train.py /b"),
        (share_view(OWNER, program="/usr/bin/python3 -m train /b"), "python3 -m train /b"),
        (replace(share_view(None), share=None, state=LiveState.DAMAGED), "(damaged)"),
    ],
)  # fmt: skip
def test_a_share_tells_what_runs_in_it(view: ShareView, text: str) -> None:
    assert command_of(view) == text


@given(st.text(), st.integers(1, 40))
def test_a_shortened_text_fits_and_says_that_it_is_shortened(text: str, most: int) -> None:
    short = shortened(text, most)
    assert cell_len(short) <= most
    assert short.isprintable()
    if text.isascii() and text.isprintable():
        assert short == (text if len(text) <= most else text[: most - 1] + "…")


def test_a_long_command_outside_takes_no_room_from_the_figures(
    capsys: pytest.CaptureFixture[str],
) -> None:
    device = Device(
        uuid=UUID, name="Tesla T4", index=0, memory_bytes=16 * GI, sm_count=40,
        compute_capability=(7, 5), numa_node=0, pci_bus_id="", simulated=True, mig=False,
    )  # fmt: skip
    rows = [DeviceRow(device, GI, ("train",), None)]
    command = "/usr/bin/python3 /srv/programs/of/somebody/first_process.py --and more"
    lines = []
    for outside in ([], [OutsideView(4194303, command, UUID, 19 * GI)]):
        devices_command._print(rows, outside, {})  # noqa: SLF001
        lines.append(capsys.readouterr().out.splitlines())
    heading, row = lines[0]
    assert [line.split() for line in lines[1][:2]] == [heading.split(), row.split()]
    assert lines[1][2].split() == ["outside", "4194303", "python3…", "19Gi"]


def test_shares_of_each_mode_are_told_apart(capsys: pytest.CaptureFixture[str]) -> None:
    views = []
    for mode in ("soft", "mps", "mig", "timeslice"):
        view = share_view(None, command=("train",))
        assert view.share is not None
        share = replace(view.share, name=f"by-{mode}", mode=mode)
        device = DeviceView(UUID, "A100", GI, 0, 0, 0)
        views.append(replace(view, name=share.name, share=share, devices=(device,)))
    views.append(replace(share_view(None), name="bad", share=None, state=LiveState.DAMAGED))
    outside = OutsideView(4711, "python", UUID, GI)
    ps_command._print(ShareStatus(tuple(views), (outside,)))  # noqa: SLF001
    heading, *rows = capsys.readouterr().out.splitlines()
    column = heading.index("MODE")
    assert heading.index("STATE") < column < heading.index("GPU")
    assert {row.split()[0]: row[column:].split(" ")[0] for row in rows} == {
        "by-soft": "soft",
        "by-mps": "mps",
        "by-mig": "mig",
        "by-timeslice": "timeslice",
        "bad": "?",
        "(outside": "",
    }


def named_view(name: str, *, used: int = 0, gpu_ns: int = 0) -> ShareView:
    view = share_view(None, command=("/usr/bin/train",))
    assert view.share is not None
    use = DeviceUse(used=used, peak=used, refusals=0, gpu_ns=gpu_ns)
    compute = ComputeView(
        promised=Compute(), is_suspended=False, is_measured=True, use=use,
        account=SeatAccount(), driver_percent=None, read_ns=0,
    )  # fmt: skip
    device = DeviceView(UUID, "A100", GI, used, used, 0, compute=compute)
    share = replace(view.share, id=ShareId(name), name=name)
    return replace(view, id=name, name=name, share=share, devices=(device,))


def test_a_watch_prints_what_changed(capsys: pytest.CaptureFixture[str]) -> None:
    outside = OutsideView(4711, "/bin/python", UUID, GI)
    later = [
        ShareStatus((named_view("a", gpu_ns=10**9), named_view("b")), ()),  # only time has passed
        ShareStatus((named_view("a"), named_view("b", used=GI)), ()),
        ShareStatus((named_view("b", used=GI), named_view("c")), ()),
        ShareStatus((named_view("b", used=GI), named_view("c")), (outside,)),
    ]
    first = ShareStatus((named_view("a"), named_view("b")), ())
    ps_command._watch(first, later, is_wide=False)  # noqa: SLF001
    printed = capsys.readouterr()
    assert [line.split()[0] for line in printed.out.splitlines()] == [
        "SHARE", "b", "SHARE", "c", "a:", "SHARE", "(outside",
    ]  # fmt: skip
    assert "a: removed\n" in printed.out
    assert printed.err == ""


def test_a_wide_table_has_whole_uuids(capsys: pytest.CaptureFixture[str]) -> None:
    status = ShareStatus((named_view("a"),), (OutsideView(4711, "python", UUID, GI),))
    ps_command._print(status, is_wide=True)  # noqa: SLF001
    assert capsys.readouterr().out.count(f" {UUID} ") == 2
    ps_command._print(status)  # noqa: SLF001
    short = capsys.readouterr().out
    assert short.count(" GPU-45f0e349 ") == 2
    assert UUID not in short
