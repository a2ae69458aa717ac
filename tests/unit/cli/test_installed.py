# SPDX-License-Identifier: Apache-2.0
"""What is not installed is said with how to install it; a fault of our own stays a fault."""

import subprocess
import sys

import pytest

from allotment.cli.options import installed
from allotment.model.errors import PrerequisiteError


def test_what_is_missing_is_named_with_what_installs_it() -> None:
    with (
        pytest.raises(PrerequisiteError) as error,
        installed("allot agent", extra="kubernetes"),
    ):
        import nothing_of_that_name  # type: ignore[import-not-found]  # noqa: F401
    assert "`allot agent` needs nothing_of_that_name" in error.value.message
    assert "pip install 'WHEEL[kubernetes]'" in (error.value.hint or "")


def test_what_is_missing_of_our_own_is_a_fault() -> None:
    with pytest.raises(ModuleNotFoundError), installed("allot agent", extra="kubernetes"):
        import allotment.nothing_of_that_name  # type: ignore[import-not-found]  # noqa: F401


_DAEMON = """
import sys
from allotment.cli.options import installed
with installed("allot agent", extra="kubernetes"):
    import allotment.agent.running
print(*(name for name in sys.modules if name.partition(".")[0] == "rich"))
import rich
"""


def test_daemons_do_without_rich() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _DAEMON], capture_output=True, text=True, check=False, timeout=120
    )
    assert (done.stdout.split(), done.stderr) == ([], "")


_ALONE = """
import sys
for name in {missing!r}:
    sys.modules[name] = None
from allotment.cli import main
sys.argv = ["allot", *{words!r}]
main()
"""
_KUBERNETES = (
    *("aiohttp", "cryptography", "grpc"),
    *("prometheus_client", "google.protobuf", "structlog"),
)


def without(missing: tuple[str, ...], *words: str) -> subprocess.CompletedProcess[str]:
    """Run `allot` as if these modules were not installed."""
    code = _ALONE.format(missing=missing, words=words)
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=120
    )


@pytest.mark.parametrize(
    "words",
    [
        ("agent", "--simulated", "t4"),
        ("uninstall",),
        ("front",),
        ("scheduler",),
        ("scheduler", "--print-config"),
        ("scheduler", "--print-manifests"),
        ("explain", "pod", "p"),
    ],
)
def test_a_command_of_kubernetes_names_what_it_needs(words: tuple[str, ...]) -> None:
    done = without((*_KUBERNETES, "numpy"), *words)
    assert done.returncode == PrerequisiteError.exit_code, done.stderr
    assert f"error: `allot {words[0]}` needs " in done.stderr
    assert "Traceback" not in done.stderr


def test_the_extra_for_simulate_is_enough_for_it() -> None:
    done = without(_KUBERNETES, "simulate", "--generate", "--scale", "0.002")
    assert done.returncode == 0, done.stderr
