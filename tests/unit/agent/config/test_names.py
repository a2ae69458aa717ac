# SPDX-License-Identifier: Apache-2.0
"""Names and patterns are NVIDIA's."""

import pytest

from allotment.agent.config.schema import matches_pattern, shared_name, whole_name
from allotment.model.errors import UsageError


@pytest.mark.parametrize(
    ("pattern", "model", "does"),
    [
        ("*", "Tesla T4", True),
        ("Tesla T4", "Tesla T4", True),
        ("Tesla", "Tesla T4", False),
        ("T4", "Tesla T4", False),
        ("*T4", "Tesla T4", True),
        ("*A100*80GB", "NVIDIA A100-SXM4-80GB", True),
        ("*A100*40GB", "NVIDIA A100-SXM4-80GB", False),
        ("*A.00*", "NVIDIA A100-SXM4-80GB", False),
        ("1g.5gb*", "1g.5gb+me", True),
        ("", "Tesla T4", False),
    ],
)
def test_patterns_are_whole_and_have_stars_alone(pattern: str, model: str, *, does: bool) -> None:
    assert matches_pattern(pattern, model) == does


def test_names_get_the_prefix_once() -> None:
    assert whole_name("gpu") == whole_name("nvidia.com/gpu") == "nvidia.com/gpu"
    assert shared_name("nvidia.com/gpu") == "nvidia.com/gpu.shared"
    assert len(whole_name("g" * 52)) == 63


@pytest.mark.parametrize("name", ["", "GPU", "-gpu", "gpu-", "a..b", "g" * 53, "gpu_a", "a/b", "ä"])
def test_names_that_are_none(name: str) -> None:
    with pytest.raises(UsageError, match=r"resource name"):
        whole_name(name)
