# SPDX-License-Identifier: Apache-2.0
"""Tables and the screen of `allot top`: whatever the values and the width, it fits, in words."""

import os
import pty
import struct
import sys
import termios
from collections.abc import Callable, Mapping, Sequence
from fcntl import ioctl
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from allotment.cli import devices as devices_command
from allotment.cli import ps as ps_command
from allotment.cli.grids import Cell, Grid
from allotment.cli.machines import DeviceRow
from allotment.cli.tables import Column, print_table
from allotment.cli.top_screens import SORTS, Frame, bar, draw
from allotment.devices.sources import Reading
from allotment.ledger import DeviceUse, SeatAccount
from allotment.model.compute import Compute, ComputeClass
from allotment.model.devices import Device
from allotment.model.errors import StateError
from allotment.model.shares import Injection, Share, ShareDevice, ShareId
from allotment.model.structs import replace
from allotment.shares.compute_view import ComputeView, Rates
from allotment.shares.status import DeviceView, LiveState, ProcessView, ShareStatus, ShareView

GI = 1 << 30


def device_row(index: int = 0) -> DeviceRow:
    device = Device(
        uuid=f"GPU-{index}0000000-1111", name="NVIDIA A100-SXM4-80GB", index=index,
        memory_bytes=80 * GI, sm_count=108, compute_capability=(8, 0), numa_node=0,
        pci_bus_id="0000:00:00.0", simulated=True, mig=False,
    )  # fmt: skip
    reading = Reading(
        used_bytes=GI, gpu_percent=50, memory_percent=1, temperature_c=40, power_mw=1, processes=()
    )
    return DeviceRow(device, 20 * GI, ("a",), reading)


def share_view(
    name: str = "train", *, used: int = 3 * GI, limit: int = 4 * GI, is_enforced: bool = True,
    command: tuple[str, ...] = ("python", "train.py"), problem: StateError | None = None,
    compute: ComputeView | None = None,
) -> ShareView:  # fmt: skip
    share = Share(
        id=ShareId("0123456789ab"), name=name, created=1.0, mode="soft",
        devices=(ShareDevice("GPU-00000000-1111", "A100", limit),), injection=Injection.CDI,
        command=command,
    )  # fmt: skip
    process = ProcessView(
        pid=4711, pid_inside=1, command=" ".join(command), is_enforced=is_enforced,
        used=(used,), context=(0,), peak=(used,), refusals=2,
    )  # fmt: skip
    device = DeviceView("GPU-00000000-1111", "A100", limit, used, used, 2, compute=compute)
    return ShareView(share.id, name, LiveState.KEPT, share, (device,), (process,), problem)


def compute_view(
    *, rates: Rates | None = None, is_measured: bool = True, driver_percent: int | None = 31
) -> ComputeView:
    return ComputeView(
        promised=Compute(3000, 8000, kind=ComputeClass.LATENCY, is_governed=is_measured),
        is_suspended=False, is_measured=is_measured, use=DeviceUse(used=0, peak=0, refusals=0),
        account=SeatAccount(waiting=1), driver_percent=driver_percent, read_ns=0, rates=rates,
    )  # fmt: skip


def drawn(frame: Frame, width: int, height: int | None = None) -> str:
    console = Console(width=width, color_system=None, legacy_windows=False)
    with console.capture() as text:
        console.print(draw(frame, width, height))
    return text.get()


def live(shares: int, *, first: int = 0, devices: int = 1, is_enforced: bool = True) -> Frame:
    """The live screen of shares that take turns."""
    rates = Rates(gpu=0.298, copy=0, held=1.2, borrowed=0.051, lent=0.02)
    views = [
        share_view(f"share-{index}", compute=compute_view(rates=rates), is_enforced=is_enforced)
        for index in range(shares)
    ]
    rows = [device_row(index) for index in range(devices)]
    return Frame(rows, views, "12:00:00", is_live=True, first=first)


def frame(*views: ShareView, sort: str = "used") -> Frame:
    return Frame([device_row()], views, "12:00:00", sort)


@pytest.mark.parametrize(
    ("part", "whole", "cells"),
    [
        (0, 8, "        "),
        (8, 8, "████████"),
        (1, 64, "▏       "),
        (4, 8, "████    "),
        (9, 8, "████████"),
        (1, 0, "        "),
        (3, 16, "█▌      "),
    ],
)
def test_bars_are_exact_to_an_eighth(part: int, whole: int, cells: str) -> None:
    assert bar(part, whole, 8).plain == cells


@given(st.integers(0, 2**70), st.integers(0, 2**70), st.integers(1, 60))
def test_a_bar_has_its_width(part: int, whole: int, width: int) -> None:
    assert len(bar(part, whole, width).plain) == width
    if 0 < whole <= part:
        assert bar(part, whole, width).plain == "█" * width
    if whole and Fraction(part, whole) < Fraction(1, width * 17):
        assert bar(part, whole, width).plain.strip() == ""


def test_all_is_said_in_words() -> None:
    text = drawn(frame(share_view(), share_view("open", is_enforced=False)), 160)
    for words in (
        "3Gi of 4Gi",
        "20Gi of 80Gi",
        "50%",
        "train.py",
        "4711",
        "simulated",
        "yes",
        "no",
    ):
        assert words in text


def test_compute_is_beside_what_was_promised() -> None:
    rates = Rates(gpu=0.298, copy=0, held=1.2, borrowed=0.051, lent=0.02)
    text = drawn(frame(share_view(compute=compute_view(rates=rates))), 160)
    for words in ("30:80 latency", "29.8%", "31%", "1.20x", "5.1%", "2.0%", "waiting"):
        assert words in text
    text = drawn(frame(share_view(compute=compute_view(rates=rates))), 60)
    for words in ("30:80 latency", "29.8%", "waiting"):
        assert words in text


def test_what_nobody_measured_is_no_figure() -> None:
    assert "GPU TIME" not in drawn(frame(share_view(compute=compute_view(is_measured=False))), 160)
    text = drawn(frame(share_view(compute=compute_view(driver_percent=None))), 160)
    (line,) = [line for line in text.splitlines() if "30:80" in line]
    assert line.split().count("-") == 5  # no look before, and a silent driver


def test_the_keys_are_told_with_what_they_change() -> None:
    text = drawn(replace(frame(share_view()), is_live=True, pace_s=0.5), 120)
    assert "s sort (by used)" in text
    assert "every 500ms" in text


def test_the_narrow_screen_keeps_what_matters() -> None:
    text = drawn(frame(share_view(is_enforced=False)), 60)
    for words in ("train", "3Gi of 4Gi", "no"):
        assert words in text


@pytest.mark.parametrize(
    ("sort", "first"),
    [("used", "much"), ("limit", "large"), ("gpu", "much"), ("name", "large"), ("age", "large")],
)
def test_orders(sort: str, first: str) -> None:
    busy = Rates(gpu=0.5, copy=0, held=0, borrowed=0, lent=0)
    text = drawn(
        frame(
            share_view("much", used=4 * GI, compute=compute_view(rates=busy)),
            share_view("large", used=GI, limit=9 * GI, compute=compute_view()),
            sort=sort,
        ),
        160,
    )
    names = ["much", "large"]
    assert min(names, key=text.index) == first
    assert sort in SORTS


@given(
    width=st.integers(20, 220),
    command=st.text(max_size=40),
    is_broken=st.booleans(),
    is_live=st.booleans(),
)
def test_it_fits_any_width_and_any_command(
    *, width: int, command: str, is_broken: bool, is_live: bool
) -> None:
    problem = StateError("it is broken") if is_broken else None
    view = share_view(command=(command,), problem=problem, compute=compute_view())
    text = drawn(replace(frame(view), is_live=is_live), width)
    assert all(len(line) <= width for line in text.splitlines())
    assert "\x1b" not in text


@given(
    width=st.integers(20, 220),
    height=st.integers(2, 60),
    shares=st.integers(0, 12),
    first=st.integers(0, 11),
    devices=st.integers(0, 9),
)
def test_it_fits_any_screen_with_the_keys_at_its_bottom(
    *, width: int, height: int, shares: int, first: int, devices: int
) -> None:
    screen = live(shares, first=min(first, max(0, shares - 1)), devices=devices)
    lines = drawn(screen, width, height).splitlines()
    assert len(lines) == height
    assert all(len(line) <= width for line in lines)
    assert lines[-1].startswith("q quit")


def test_shares_far_below_the_screen_are_not_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = 0
    add = Grid.add

    def counted(grid: Grid, cells: Mapping[str, Cell]) -> None:
        nonlocal rows
        rows += 1
        add(grid, cells)

    monkeypatch.setattr(Grid, "add", counted)
    lines = drawn(live(2400), 80, 24).splitlines()
    assert "↓ 23" in lines[-2]
    assert rows < 50  # of a screen of 24 lines


def test_a_usual_terminal_has_seven_shares_and_their_compute() -> None:
    lines = drawn(live(7), 80, 24).splitlines()
    for index in range(7):
        assert sum(line.startswith(f"share-{index} ") for line in lines) == 2
    assert "processes hidden" in lines[-2]
    assert "q quit" in lines[-1]
    assert "more" not in lines[-2]
    assert "4711" in drawn(live(7), 80, 40)


def test_a_small_terminal_loses_columns_and_lines_as_wholes_and_says_so() -> None:
    text = drawn(live(7, first=1), 40, 12)
    lines = text.splitlines()
    assert "…" not in "".join(lines[1:])
    (shares,) = [line.split() for line in lines if "ENFORCED" in line]
    assert shares == ["SHARE", "USED", "OF", "LIMIT", "ENFORCED"]
    (compute,) = [line.split() for line in lines if "GPU TIME" in line]
    assert compute == ["SHARE", "COMPUTE", "GPU", "TIME"]
    shown = [line.split()[0] for line in lines if line.startswith("share-")]
    assert shown == ["share-1", "share-2"] * 2
    assert "↑ 1 more  ↓ 4 more" in text


def test_what_is_not_enforced_is_shown_before_anything_else() -> None:
    assert drawn(live(3, is_enforced=False), 80, 24).count("4711") == 3
    assert drawn(live(7, is_enforced=False), 80, 20).count("4711") > 1


def test_few_lines_are_for_the_shares() -> None:
    text = drawn(live(3, devices=9), 100, 14)
    assert "5 more GPUs (see `allot devices`)" in text
    assert text.count("share-0") == 2


def test_more_lines_than_there_are_is_said() -> None:
    assert "↓ 6 more lines" in drawn(live(7), 20, 4)


def test_an_oversubscribed_share_is_marked() -> None:
    plain = share_view("plain")
    assert "HOST" not in drawn(frame(plain), 160)
    over = share_view("over")
    device = replace(over.devices[0], is_oversubscribed=True, host_bytes=2 * GI)
    text = drawn(frame(plain, replace(over, devices=(device,))), 160)
    assert "3Gi of 4Gi+host   2Gi" in text
    assert "3Gi of 4Gi     -" in text


@pytest.mark.parametrize("width", [40, 60, 80, 160])
def test_a_suspended_share_is_shown_so_at_every_width(width: int) -> None:
    suspended = replace(share_view("b"), state=LiveState.SUSPENDED)
    assert "suspended" not in drawn(frame(share_view("a")), width)
    shown = drawn(frame(share_view("a"), suspended), width).splitlines()
    assert [line.split()[:2] for line in shown if "suspended" in line] == [["b", "suspended"]]
    words = printed_by_ps([share_view("a"), suspended], width=width)
    assert [line.split()[:2] for line in words if "suspended" in line] == [["b", "suspended"]]
    assert "ENFORCED" in words[0]


@pytest.mark.parametrize(
    ("width", "headings"),
    [
        (80, ["#", "UUID", "MODEL", "ALLOTTED", "USED", "GPU", "SHARES", "MODE"]),
        (60, ["#", "UUID", "ALLOTTED", "USED", "MODE"]),
        (160, ["#", "UUID", "MODEL", "MEMORY", "ALLOTTED", "USED", "GUARANTEED", "GPU", "SHARES",
               "MODE", "KIND"]),
    ],
)  # fmt: skip
def test_a_narrow_terminal_gets_what_matters_of_devices(width: int, headings: list[str]) -> None:
    row = replace(device_row(), mode="soft")
    shown = on_terminal(lambda: devices_command._print([row], [], {}), width=width)  # noqa: SLF001
    assert shown[0].split() == headings
    assert all(len(line) <= width for line in shown)
    assert "GPU-00000000 " in shown[1]
    wide = on_terminal(lambda: devices_command._print([row], [], {}, is_wide=True), width=width)  # noqa: SLF001
    assert wide[0].split()[-1] == "KIND"
    assert "GPU-00000000-1111" in wide[1]


def test_a_weight_is_shown_where_it_is_another_than_the_others() -> None:
    promised = Compute(3000, 8000, 300, is_governed=True)
    view = share_view(compute=replace(compute_view(), promised=promised))
    assert "30:80 weight 300" in drawn(frame(view), 160)
    assert "weight" not in drawn(frame(share_view(compute=compute_view())), 160)


def test_no_shares_is_said() -> None:
    assert "No shares." in drawn(frame(), 80)
    without = replace(frame(), devices=(), why_no_devices="no NVIDIA driver was found")
    assert "No shares: no NVIDIA driver was found" in drawn(without, 80)


def test_tables_are_aligned_and_keep_control_characters_out(
    capsys: pytest.CaptureFixture[str],
) -> None:
    columns = (Column("NAME"), Column("SIZE", is_number=True), Column("COMMAND"))
    print_table(columns, [("a", "10Gi", "x\x1b[31m\ny"), ("long", "1Gi", "")])
    assert capsys.readouterr().out == (
        "NAME  SIZE  COMMAND\n"
        "a     10Gi  x [31m y\n"
        "long   1Gi\n"
    )  # fmt: skip


def test_a_screen_keeps_out_what_is_no_text() -> None:
    name = "\udcff\x1b[31m"  # of a folder that another user made
    view = share_view(name, problem=StateError(f"/shares/{name}: damaged"), command=(name,))
    text = drawn(frame(view), 120)
    assert text.count("\\udcff [31m") == 5
    assert "! \\udcff [31m: /shares/\\udcff [31m: damaged" in text
    assert "\x1b" not in text


def test_a_table_without_rows_is_its_headings(capsys: pytest.CaptureFixture[str]) -> None:
    print_table((Column("A"), Column("B")), [])
    assert capsys.readouterr().out == "A  B\n"


def printed(columns: Sequence[Column], rows: Sequence[Sequence[str]], *, width: int) -> list[str]:
    return on_terminal(lambda: print_table(columns, rows), width=width)


def printed_by_ps(views: Sequence[ShareView], *, width: int) -> list[str]:
    status = ShareStatus(tuple(views), ())
    return on_terminal(lambda: ps_command._print(status), width=width)  # noqa: SLF001


def on_terminal(write: Callable[[], None], *, width: int) -> list[str]:
    """What is printed on a terminal of so many columns."""
    child, terminal = pty.fork()
    if child == 0:
        ioctl(1, termios.TIOCSWINSZ, struct.pack("HHHH", 24, width, 0, 0))
        os.environ.pop("COLUMNS", None)
        os.environ["NO_COLOR"] = "1"
        sys.stdout = os.fdopen(1, "w", encoding="utf-8", closefd=False)  # pytest has the other one
        write()
        sys.stdout.flush()
        os._exit(0)
    seen = b""
    while True:
        try:
            seen += os.read(terminal, 65536)
        except OSError:  # its other end is closed
            break
    os.close(terminal)
    os.waitpid(child, 0)
    return seen.decode().splitlines()


def test_a_narrow_terminal_gets_fewer_columns_and_no_line_is_wrapped() -> None:
    columns = (
        Column("NAME"), Column("STATE", rank=1), Column("SIZE", is_number=True),
        Column("MORE", rank=2), Column("COMMAND", least=12),
    )  # fmt: skip
    rows = [("train", "running", "10Gi", "more", "python train.py --epochs 10")]
    assert printed(columns, rows, width=80) == [
        "NAME   STATE    SIZE  MORE  COMMAND",
        "train  running  10Gi  more  python train.py --epochs 10",
    ]
    assert printed(columns, rows, width=36) == [
        "NAME   STATE    SIZE  COMMAND",
        "train  running  10Gi  python train.…",
    ]
    assert printed(columns, rows, width=26) == [
        "NAME   SIZE  COMMAND",
        "train  10Gi  python train…",
    ]


def test_a_note_that_does_not_fit_is_whole_on_a_line_of_its_own() -> None:
    columns = (Column("GPU"), Column("STEP"), Column("REMARK", is_note=True))
    rows = [("GPU-1", "switch MIG on", "needs a reset: `allot ...`"), ("GPU-2", "-", "")]
    assert printed(columns, rows, width=80) == [
        "GPU    STEP           REMARK",
        "GPU-1  switch MIG on  needs a reset: `allot ...`",
        "GPU-2  -",
    ]
    assert printed(columns, rows, width=40) == [
        "GPU    STEP",
        "GPU-1  switch MIG on",
        "  needs a reset: `allot ...`",
        "GPU-2  -",
    ]


def test_wide_characters_take_their_cells() -> None:
    columns = (Column("NAME"), Column("COMMAND", least=2))
    assert printed(columns, [("訓練", "x"), ("ab", "y")], width=80) == [
        "NAME  COMMAND",
        "訓練  x",
        "ab    y",
    ]
    assert printed(columns, [("ab", "訓練訓練訓練")], width=13)[1] == "ab    訓練訓…"
