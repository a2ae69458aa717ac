# SPDX-License-Identifier: Apache-2.0
"""`allotment.agent.labels.features`: names as NVIDIA writes them, labels as Kubernetes takes
them."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from allotment.agent.labels.features import MAX_LABEL, fitting, sanitised

# apimachinery pkg/util/validation/validation.go: IsValidLabelValue.
VALUE = re.compile(r"(([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9])?")


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("Tesla T4", "Tesla-T4"),
        ("NVIDIA A100-SXM4-80GB", "NVIDIA-A100-SXM4-80GB"),
        ("NVIDIA H100 80GB HBM3", "NVIDIA-H100-80GB-HBM3"),
        ("Quadro RTX 6000/8000", "Quadro-RTX-60008000"),
        ("Standard PC (Q35 + ICH9, 2009)", "Standard-PC-Q35-ICH9-2009"),
        ("  many   spaces ", "many-spaces"),
        ("", ""),
    ],
)
def test_names_are_written_as_nvidia_does(name: str, expected: str) -> None:
    assert sanitised(name) == expected


def test_what_kubernetes_takes_stays_as_it_is() -> None:
    labels = {"nvidia.com/b": "", "nvidia.com/a.b-c_d": "x" * 63, "plain": "A.b_c-9"}
    assert fitting(labels) == (dict(sorted(labels.items())), ())


def test_what_it_refuses_is_changed_or_left_out_and_told() -> None:
    labels, notes = fitting(
        {
            "nvidia.com/gpu.machine": "Board " + "x" * 80,
            "nvidia.com/gpu.product": "-NVIDIA-X.",
            f"nvidia.com/{'k' * 64}": "1",
            "Not A Prefix/key": "1",
        }
    )
    assert labels == {
        "nvidia.com/gpu.machine": "Board-" + "x" * 57,
        "nvidia.com/gpu.product": "NVIDIA-X",
    }
    assert len(notes) == 4


@given(st.dictionaries(st.text(max_size=80), st.text(max_size=200), max_size=4))
def test_nothing_comes_out_that_kubernetes_refuses(labels: dict[str, str]) -> None:
    found, notes = fitting(labels)
    for key, value in found.items():
        assert VALUE.fullmatch(value)
        assert len(value) <= MAX_LABEL
        assert len(key.rpartition("/")[2]) <= MAX_LABEL
        assert labels[key] == value or any(note.startswith(key) for note in notes)
    assert all(key in found or any(repr(key) in note for note in notes) for key in labels)


@given(st.text(alphabet=st.characters(codec="ascii"), max_size=60))
def test_a_sanitised_name_is_sanitised_once_for_all(name: str) -> None:
    assert sanitised(sanitised(name)) == sanitised(name)
