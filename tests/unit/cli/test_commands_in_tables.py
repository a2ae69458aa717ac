# SPDX-License-Identifier: Apache-2.0
"""What runs in a share and outside of all, in tables: said, and never at a figure's expense."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from allotment.cli import devices as devices_command
from allotment.cli import ps as ps_command
from allotment.cli.machines import DeviceRow
from allotment.cli.tables import command_of, shortened
from allotment.model.devices import Device
from allotment.model.pods import ContainerKind, Owner, PodUid
from allotment.model.shares import Injection, Share, ShareDevice, ShareId
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
        (replace(share_view(None), share=None, state=LiveState.DAMAGED), "(damaged)"),
    ],
)
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
    assert lines[1][:2] == lines[0]
    assert lines[1][2].split() == [
        "(outside", "any", "share)", "4194303", "/usr/bi…", "19Gi",
    ]  # fmt: skip


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
