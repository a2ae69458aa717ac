# SPDX-License-Identifier: Apache-2.0
"""Options of `allot resize` without effect."""

import pytest
from click.testing import CliRunner

from allotment.cli.resize import command


@pytest.mark.parametrize(
    ("words", "option"),
    [
        (["--pod", "--force"], "--force"),
        (["--pod", "--host-memory", "1Gi"], "--host-memory"),
        (["-c", "main"], "--container"),
        (["-n", "ml"], "--namespace"),
        (["--context", "x"], "--context"),
        (["--kubeconfig", "x"], "--kubeconfig"),
    ],
)
def test_an_option_without_effect_is_refused(words: list[str], option: str) -> None:
    error = CliRunner().invoke(command, ["train", "--memory", "1Gi", *words]).exception
    assert f"{option} has no effect" in str(error)
