# SPDX-License-Identifier: Apache-2.0
"""NVIDIA's CDI devices are described where the configuration asks for them, and only there."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from gpus import gpu

from allotment.agent.config.schema import Config, DeviceListStrategy, PluginConfig
from allotment.agent.maintenance import NvidiaSpecs, make_specs
from allotment.model.devices import Device
from allotment.model.errors import NoDevicesError, StateError
from allotment.model.structs import replace
from allotment.shares.cdi import extra_edits

TWO = (gpu(0), gpu(1))


def edits(devices: Sequence[Device]) -> Mapping[str, Sequence[Any]]:
    (one,) = devices
    if one.index == 7:
        raise NoDevicesError("/dev/nvidia7 is not there")
    return {"deviceNodes": [{"path": f"/dev/nvidia{one.index}"}], "mounts": []}


def config(*strategies: str, **plugin: str) -> Config:
    named = tuple(map(DeviceListStrategy, strategies)) or None
    return Config(plugin=PluginConfig(device_list_strategies=named, **plugin))  # type: ignore[arg-type]


@pytest.mark.parametrize("strategies", [(), ("envvar", "volume-mounts")], ids=["none", "others"])
def test_nothing_is_described_that_nobody_names(strategies: tuple[str, ...]) -> None:
    assert make_specs(TWO, config(*strategies), edits) == ({}, ())


def test_every_gpu_is_a_device() -> None:
    specs, problems = make_specs(TWO, config("cdi-cri"), edits)
    assert problems == ()
    assert specs == {
        "gpu": {
            "cdiVersion": "0.5.0",
            "kind": "k8s.device-plugin.nvidia.com/gpu",
            "devices": [
                {
                    "name": f"GPU-{index}",
                    "containerEdits": {"deviceNodes": [{"path": f"/dev/nvidia{index}"}]},
                }
                for index in range(2)
            ],
            "containerEdits": {"env": ["NVIDIA_VISIBLE_DEVICES=void"]},
        }
    }


def test_devices_are_named_as_the_answers_name_them() -> None:
    specs, _ = make_specs(TWO, config("cdi-annotations", device_id_strategy="index"), edits)
    assert [each["name"] for each in specs["gpu"]["devices"]] == ["0", "1"]


def test_channels_are_devices_too() -> None:
    specs, _ = make_specs((), replace(config("cdi-cri"), imex_channel_ids=(0,)), edits)
    (channel,) = specs["imex-channel"]["devices"]
    assert channel["name"] == "0"
    assert "gpu" not in specs


def test_extras_are_described_by_the_devices_that_are_there(tmp_path: Path) -> None:
    on = replace(config("cdi-cri"), gds_enabled=True, mofed_enabled=True, gdrcopy_enabled=True)
    extras = partial(extra_edits, root=tmp_path)
    assert make_specs((), on, edits, extras) == ({}, ())
    for node in ("dev/nvidia-fs1", "dev/nvidia-fs0", "dev/infiniband/rdma_cm"):
        path = tmp_path / node
        path.parent.mkdir(parents=True, exist_ok=True)
        path.symlink_to("/dev/null")
    (tmp_path / "dev" / "gdrdrv").write_text("no device")
    (tmp_path / "run" / "udev").mkdir(parents=True)
    specs, _ = make_specs((), on, edits, extras)
    assert set(specs) == {"gds", "mofed"}
    assert specs["gds"]["kind"] == "k8s.device-plugin.nvidia.com/gds"
    (storage,) = specs["gds"]["devices"]
    assert storage["name"] == "all"
    assert storage["containerEdits"]["deviceNodes"] == [
        {"path": "/dev/nvidia-fs0"},
        {"path": "/dev/nvidia-fs1"},
    ]
    assert [each["containerPath"] for each in storage["containerEdits"]["mounts"]] == ["/run/udev"]
    (network,) = specs["mofed"]["devices"]
    assert network["containerEdits"] == {"deviceNodes": [{"path": "/dev/infiniband/rdma_cm"}]}
    assert make_specs((), config("cdi-cri"), edits, extras) == ({}, ())


def test_a_gpu_that_cannot_be_described_hides_no_other() -> None:
    specs, problems = make_specs((*TWO, gpu(7)), config("cdi-cri"), edits)
    assert len(specs["gpu"]["devices"]) == 2
    assert problems == ("GPU-7: /dev/nvidia7 is not there",)


def test_files_follow_the_configuration(tmp_path: Path) -> None:
    specs = NvidiaSpecs(tmp_path, edits)
    path = tmp_path / "k8s.device-plugin.nvidia.com-gpu.json"
    specs.keep(TWO, config())
    assert list(tmp_path.iterdir()) == []
    specs.keep(TWO, config("cdi-cri"))
    assert len(json.loads(path.read_text())["devices"]) == 2
    first = path.stat().st_ino
    specs.keep(TWO, config("cdi-cri"))
    assert path.stat().st_ino == first
    specs.keep(TWO[:1], config("cdi-cri"))
    assert len(json.loads(path.read_text())["devices"]) == 1
    specs.keep(TWO, config())
    assert list(tmp_path.iterdir()) == []


def test_what_another_plugin_wrote_stays(tmp_path: Path) -> None:
    path = tmp_path / "k8s.device-plugin.nvidia.com-gpu.json"
    path.write_text("{}")
    NvidiaSpecs(tmp_path, edits).keep(TWO, config())
    assert path.read_text() == "{}"


def test_a_folder_that_cannot_be_written_is_told_of(tmp_path: Path) -> None:
    (tmp_path / "cdi").write_text("")
    specs = NvidiaSpecs(tmp_path / "cdi", edits)
    with pytest.raises(StateError, match="CDI spec"):
        specs.keep(TWO, config("cdi-cri"))
    (tmp_path / "cdi").unlink()
    specs.keep(TWO, config("cdi-cri"))
    assert len(list((tmp_path / "cdi").iterdir())) == 1
