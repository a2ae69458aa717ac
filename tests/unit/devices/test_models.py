# SPDX-License-Identifier: Apache-2.0
"""The table of models: what the issue promises, and what must hold for every row."""

from __future__ import annotations

import pytest

from allotment.devices.model_facts import Architecture, Fabric, Model, NvlinkVersion
from allotment.devices.models import MODELS

ROWS = pytest.mark.parametrize("model", MODELS.values(), ids=str)

PROMISED = {
    "t4": ("Tesla T4", 15360, 40, (7, 5)),
    "p100": ("Tesla P100-PCIE-16GB", 16384, 56, (6, 0)),
    "v100-16gb": ("Tesla V100-SXM2-16GB", 16384, 80, (7, 0)),
    "v100-32gb": ("Tesla V100-SXM2-32GB", 32768, 80, (7, 0)),
    "a10": ("NVIDIA A10", 23028, 72, (8, 6)),
    "a30": ("NVIDIA A30", 24576, 56, (8, 0)),
    "a100-40gb": ("NVIDIA A100-SXM4-40GB", 40960, 108, (8, 0)),
    "a100-80gb": ("NVIDIA A100-SXM4-80GB", 81920, 108, (8, 0)),
    "l4": ("NVIDIA L4", 23034, 58, (8, 9)),
    "l40s": ("NVIDIA L40S", 46068, 142, (8, 9)),
    "rtx4090": ("NVIDIA GeForce RTX 4090", 24564, 128, (8, 9)),
    "h100-80gb": ("NVIDIA H100 80GB HBM3", 81559, 132, (9, 0)),
    "h100nvl": ("NVIDIA H100 NVL", 95830, 132, (9, 0)),
    "h200": ("NVIDIA H200", 143771, 132, (9, 0)),
    "gh200": ("NVIDIA GH200 480GB", 97871, 132, (9, 0)),
    "b200": ("NVIDIA B200", 183359, 148, (10, 0)),
    "rtx-pro-6000": ("NVIDIA RTX PRO 6000 Blackwell Server Edition", 97887, 188, (12, 0)),
}
MIG = {
    "a30",
    "a100-40gb",
    "a100-80gb",
    "h100-80gb",
    "h100nvl",
    "h200",
    "gh200",
    "b200",
    "rtx-pro-6000",
}


def test_every_promised_model_is_there_as_nvml_names_it() -> None:
    assert {
        key: (model.name, model.memory_mib, model.sm_count, model.core.compute_capability)
        for key, model in MODELS.items()
    } == PROMISED


def test_mig_is_for_datacenter_models_from_ampere_on() -> None:
    assert {key for key, model in MODELS.items() if model.mig} == MIG


@ROWS
def test_a_model_fits_its_own_context_and_reserve(model: Model) -> None:
    assert 0 < model.reserved_mib < model.memory_mib // 10
    assert 100 <= model.context_mib <= 640
    assert model.context_mib % 2 == 0, "contexts take whole 2 MiB pages"


@ROWS
def test_a_model_is_consistent(model: Model) -> None:
    default, least, most = model.power
    idle, slowdown, shutdown = model.temperatures
    assert least <= default <= most
    assert model.power_idle < least
    assert idle < slowdown - 14 < slowdown < shutdown
    assert model.sm_clock <= model.sm_clock_max
    assert (model.nvlinks > 0) is (model.fabric is not Fabric.NONE)
    assert (model.nvlinks > 0) is (model.nvlink_version is not NvlinkVersion.NONE)
    assert model.nvlinks <= 18
    assert len(model.name) < 64, "the oldest NVML buffer"
    assert model.core.shared_per_block_optin <= model.core.shared_per_sm


def test_links_are_those_of_the_boards() -> None:
    versions = {
        Architecture.VOLTA: (6, NvlinkVersion.V2_0),
        Architecture.HOPPER: (18, NvlinkVersion.V4_0),
        Architecture.BLACKWELL: (18, NvlinkVersion.V5_0),
    }
    for model in MODELS.values():
        if model.fabric in {Fabric.SWITCH, Fabric.DIRECT} and model.core.architecture in versions:
            assert (model.nvlinks, model.nvlink_version) == versions[model.core.architecture]
    assert MODELS["a100-80gb"].nvlinks == 12
    assert MODELS["a30"].nvlinks == 4
    assert MODELS["h100nvl"].nvlinks == 12
    assert MODELS["t4"].nvlinks == MODELS["l40s"].nvlinks == MODELS["rtx4090"].nvlinks == 0
