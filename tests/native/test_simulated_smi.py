# SPDX-License-Identifier: Apache-2.0
"""The nvidia-smi of simulated GPUs: what the programs that call the real one do with it."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from itertools import groupby, pairwise
from pathlib import Path
from xml.etree import ElementTree as ET

import pynvml
import pytest

from allotment.devices.faults import set_fault
from allotment.devices.loading import nvml_of
from allotment.devices.packing import read_machine
from allotment.devices.simulated import SimulatedMachine, capabilities_path

SPEC = "a100-80gb[mig=3g.40gb+1g.10gb],h100-80gb,t4"
Smi = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def path(machine: Callable[[str], Path]) -> Path:
    return machine(SPEC)


@pytest.fixture
def smi(path: Path, native_dir: Path) -> Smi:
    """Runs nvidia-smi on the machine; the library is found beside the program."""
    environment = {**os.environ, "ALLOTMENT_SIMULATED_MACHINE": str(path)}
    environment.pop("LD_LIBRARY_PATH", None)

    def run(*words: str, **variables: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [native_dir / "simulated" / "nvidia-smi", *words],
            env=environment | variables,
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )

    return run


def lines(done: subprocess.CompletedProcess[str]) -> list[str]:
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()


@pytest.mark.parametrize(
    "words",
    ["", "mig -lgi", "mig -lgip", "mig -lci", "mig -lcip"],
    ids=lambda words: words or "table",
)
def test_the_lines_of_a_table_are_equally_long(smi: Smi, words: str) -> None:
    blocks = groupby(lines(smi(*words.split())), key=lambda line: line[:1] in "+|" and line != "")
    tables = [[len(line) for line in block] for is_table, block in blocks if is_table]
    assert tables
    assert all(one == other for widths in tables for one, other in pairwise(widths))


def test_the_table_says_what_the_gpus_do_and_that_they_are_simulated(smi: Smi) -> None:
    text = "\n".join(lines(smi()))
    assert "simulated" in text.splitlines()[0]
    assert "Driver Version: 580.95.05      CUDA Version: 13.0" in text
    assert "0MiB / 81920MiB |" in text
    assert "Enabled |" in text
    assert "|  0    7   0   1  |" in text
    assert "No running processes found" in text


def test_gputil_reads_the_gpus(smi: Smi, path: Path) -> None:
    # GPUtil 1.4.0, getGPUs: this query, split at ", ", twelve fields in this order.
    fields = (
        "index,uuid,utilization.gpu,memory.total,memory.used,memory.free,driver_version,name,"
        "gpu_serial,display_active,display_mode,temperature.gpu"
    )
    rows = [
        line.split(", ")
        for line in lines(smi(f"--query-gpu={fields}", "--format=csv,noheader,nounits"))
    ]
    devices = read_machine(path).devices
    assert [row[:2] for row in rows] == [[str(each.index), each.uuid] for each in devices]
    assert [int(row[3]) << 20 for row in rows] == [each.memory_bytes for each in devices]
    assert [row[7] for row in rows] == [each.name for each in devices]
    assert all(len(row) == 12 and float(row[11]) > 20 for row in rows)
    # In MIG mode there is none, and GPUtil takes what is no number for NaN.
    assert [row[2] for row in rows] == ["[N/A]", "0", "0"]


def test_columns_are_headed_by_their_first_name_and_unit(smi: Smi) -> None:
    query = "--query-gpu=gpu_name, clocks.sm,fan.speed,power.limit"
    head, _, _, last = lines(smi(query, "--format=csv"))
    assert head == "name, clocks.current.sm [MHz], fan.speed [%], power.limit [W]"
    assert last == "Tesla T4, 210 MHz, [N/A], 70.00 W"
    assert lines(smi("-i", "2", query, "--format=csv,nounits"))[1] == "Tesla T4, 210, [N/A], 70.00"


def test_every_field_can_be_queried(smi: Smi) -> None:
    names = [line.split()[0] for line in lines(smi("--help-query-gpu"))[2:]]
    assert len(names) > 100
    done = smi(f"--query-gpu={','.join(names)}", "--format=csv,noheader")
    assert {len(line.split(", ")) for line in lines(done)} == {len(names)}


@pytest.mark.parametrize(
    ("words", "status", "text"),
    [
        (["--query-gpu=nonsense", "--format=csv"], 2, '"nonsense" is not a valid field'),
        (["--query-gpu=.name", "--format=csv"], 2, "is not a valid field"),
        (["--query-gpu=name"], 2, "--format=csv"),
        (["--frobnicate"], 2, "--frobnicate"),
        (["-i", "7"], 6, "No devices were found"),
        (["-x"], 2, "-x without -q"),
        (["mig", "-lgi", "-i", "2"], 6, "No GPU instances found"),
        (["-q", "-d", "NOTHING"], 2, "NOTHING"),
        (["-c", "7"], 2, '"7" is not a valid value'),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_what_is_wrong_has_the_status_of_the_manual(
    smi: Smi, words: list[str], status: int, text: str
) -> None:
    done = smi(*words)
    assert done.returncode == status, done.stdout
    assert text in done.stdout


def test_a_gpu_is_named_in_every_way(smi: Smi, path: Path) -> None:
    device = read_machine(path).devices[1]
    serial = lines(smi("-i", "1", "--query-gpu=serial", "--format=csv,noheader"))[0]
    bus = device.pci_bus_id
    for name in ("1", device.uuid, serial, bus, bus[4:], bus[4:].lower()):
        assert device.uuid in lines(smi("-L", "-i", name))[0]
    assert len(lines(smi("-L", "-i", "1,2"))) == 2


def test_the_list_has_the_mig_devices(smi: Smi, path: Path) -> None:
    first, large, small, *_ = lines(smi("-L"))
    device = read_machine(path).devices[0]
    assert first == f"GPU 0: {device.name} (UUID: {device.uuid})"
    assert large.startswith("  MIG 3g.40gb     Device  0: (UUID: MIG-")
    assert small.startswith("  MIG 1g.10gb     Device  1: (UUID: MIG-")


def test_the_report_is_xml_with_the_names_of_nvidia(smi: Smi, path: Path) -> None:
    report = ET.fromstring("\n".join(lines(smi("-q", "-x"))))  # noqa: S314 - our own
    gpus = report.findall("gpu")
    assert report.findtext("attached_gpus") == "3"
    devices = read_machine(path).devices
    assert [gpu.findtext("uuid") for gpu in gpus] == [each.uuid for each in devices]
    assert gpus[1].findtext("fb_memory_usage/total") == "81559 MiB"
    assert gpus[0].findtext("mig_mode/current_mig") == "Enabled"
    assert len(gpus[0].findall("mig_devices/mig_device")) == 2
    assert gpus[2].findtext("mig_devices") == "None"
    assert gpus[2].findtext("pci/pci_gpu_link_info/link_widths/max_link_width") == "16x"
    assert gpus[2].findtext("temperature/gpu_temp", "").endswith(" C")


def test_the_text_report_shows_the_wanted_sections(smi: Smi) -> None:
    text = lines(smi("-q", "-d", "MEMORY,ECC", "-i", "1"))
    indented = [line for line in text if line.startswith("    ") and not line.startswith("     ")]
    groups = [line.split(" :")[0].strip() for line in indented]
    assert groups == ["FB Memory Usage", "BAR1 Memory Usage", "ECC Mode", "ECC Errors"]


def test_instances_are_cut_and_removed(smi: Smi, path: Path) -> None:
    assert smi("-i", "1", "-mig", "1").returncode == 0
    made = lines(smi("mig", "-i", "1", "-cgi", "19,3g.40gb:0", "-C"))
    assert made[0].endswith("on GPU  1 using profile MIG 1g.10gb (ID 19)")
    assert made[2].startswith("Successfully created GPU instance ID")
    assert len(made) == 4
    slices = [each for each in lines(smi("-L", "-i", "1")) if "MIG" in each]
    assert [each.split()[1] for each in slices] == ["3g.40gb", "1g.10gb"]
    assert (capabilities_path(path) / "gpu1").is_dir()
    assert smi("mig", "-i", "1", "-cgi", "7g.80gb").returncode == 23
    assert len(lines(smi("mig", "-i", "1", "-dci"))) == 2
    assert smi("mig", "-i", "1", "-dci").returncode == 6
    assert len(lines(smi("mig", "-i", "1", "-dgi"))) == 2
    assert smi("-i", "1", "-mig", "0").returncode == 0
    assert not SimulatedMachine(path).devices()[1].mig


def test_an_ampere_needs_a_reset_for_its_mode(smi: Smi) -> None:
    done = smi("-i", "0", "-mig", "0")
    assert done.returncode == 0
    assert "pending disable state" in done.stdout
    assert "*" in smi("-i", "0").stdout
    assert "successfully reset" in "\n".join(lines(smi("-i", "0", "--gpu-reset")))
    assert lines(smi("-i", "0", "--query-gpu=mig.mode.current", "--format=csv,noheader")) == [
        "Disabled"
    ]


def test_the_compute_mode_is_set_as_nvidias_mps_daemon_does(smi: Smi, path: Path) -> None:
    uuid = read_machine(path).devices[2].uuid
    assert smi("-i", uuid, "-c", "EXCLUSIVE_PROCESS").returncode == 0
    with nvml_of(path) as nvml:
        handle = nvml.nvmlDeviceGetHandleByIndex(2)
        assert nvml.nvmlDeviceGetComputeMode(handle) == pynvml.NVML_COMPUTEMODE_EXCLUSIVE_PROCESS
    assert "E. Process" in smi().stdout
    assert smi("-i", uuid, "-c", "0").returncode == 0


def test_a_tenant_changes_nothing(smi: Smi, path: Path) -> None:
    uuid = read_machine(path).devices[1].uuid
    for words in (["-mig", "1"], ["--gpu-reset"], ["compute-policy", "--set-timeslice=long"]):
        done = smi(*words, ALLOTMENT_SIMULATED_DEVICES=uuid)
        assert done.returncode == 4, done.stdout


def test_a_lost_gpu_is_shown_and_the_others_too(smi: Smi, path: Path) -> None:
    set_fault(path, 1, lost=True)
    done = smi()
    assert done.returncode == 15
    assert "ERR!" in done.stdout
    assert "Tesla T4" in done.stdout
    rows = smi("--query-gpu=name", "--format=csv,noheader")
    assert rows.returncode == 15
    assert "GPU is lost" in rows.stdout


def test_monitors_have_a_line_for_each_gpu(smi: Smi) -> None:
    head, units, *rows = lines(smi("dmon", "-c", "2", "-d", "1"))
    assert head.split()[1:4] == ["gpu", "pwr", "gtemp"]
    assert len(head.split()) == len(units.split()) == 13
    assert [row.split()[0] for row in rows] == ["0", "1", "2"] * 2
    rows = lines(smi("pmon", "-c", "1"))[2:]
    assert [row.split()[:2] for row in rows] == [["0", "-"], ["1", "-"], ["2", "-"]]


def test_another_drivers_library_is_refused(smi: Smi, tmp_path: Path, cc: list[str]) -> None:
    library = tmp_path / "libnvidia-ml.so.1"
    (tmp_path / "other.c").write_text("int nvmlInit_v2(void) { return 0; }\n")
    subprocess.run([*cc, "-shared", "-o", library, tmp_path / "other.c"], check=True)
    done = smi(LD_LIBRARY_PATH=str(tmp_path))
    assert done.returncode == 13
    assert "another driver's" in done.stderr
