# SPDX-License-Identifier: Apache-2.0
"""docs/reference/simulated.md tells of the models and keys that there are."""

from __future__ import annotations

import re
from pathlib import Path

from allotment.devices.descriptions import parse_short, parse_yaml
from allotment.devices.models import MODELS

ECC = {True: "on", False: "off", None: "none"}


def test_the_table_of_models_is_the_models(root: Path) -> None:
    text = (root / "docs" / "reference" / "simulated.md").read_text()
    rows = {
        cells[0].strip("`"): cells[1:]
        for cells in (
            [cell.strip() for cell in line.strip("|").split("|")]
            for line in text.splitlines()
            if line.startswith("| `") and line.count("|") == 12
        )
    }
    assert list(rows) == list(MODELS)
    for key, model in MODELS.items():
        name, total, reserved, context, sms, compute, watts, links, ecc, mig = rows[key]
        assert name == model.name
        assert [int(total), int(reserved), int(context), int(sms), int(watts)] == [
            model.memory_mib,
            model.reserved_mib,
            model.context_mib,
            model.sm_count,
            model.power[0],
        ]
        assert compute == ".".join(map(str, model.core.compute_capability))
        assert links.startswith(str(model.nvlinks or "—"))
        assert ecc == ECC[model.ecc]
        assert mig == ("yes" if model.mig else "no")


def test_the_examples_are_machines(root: Path) -> None:
    text = (root / "docs" / "reference" / "simulated.md").read_text()
    (example,) = re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)
    assert len(parse_yaml(example, source="example").gpus) == 5
    shorts = re.findall(r"^    (\S+) {3,}\S", text, re.MULTILINE)
    assert len(shorts) == 3
    for short in shorts:
        assert parse_short(short).gpus


def test_the_table_of_rates_is_the_models(root: Path) -> None:
    text = (root / "docs" / "reference" / "simulated.md").read_text()
    table = text.split("## Rates of copies")[1].split("\n## ")[0]
    rows = re.findall(r"^\| `([\w-]+)` \| (\d+) \| (\d+) \| (\d+) \|$", table, re.MULTILINE)
    assert rows == [
        (key, str(model.h2d), str(model.d2h), str(model.d2d)) for key, model in MODELS.items()
    ]
