# SPDX-License-Identifier: Apache-2.0
"""Bad input, bad circumstances: a clear error and the next step; nothing lost or half made."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from allotment.shares.run.namespace import can_unshare

Allot = Any  # tests/conftest.py: CommandLine
RUN = ("run", "--simulated", "a100-80gb:2", "--memory")


def refused(done: "subprocess.CompletedProcess[str]", status: int, *says: str) -> None:
    assert done.returncode == status, done.stderr
    assert done.stdout == ""
    assert done.stderr.startswith("error: ")
    assert "\n\nhint: " in done.stderr
    assert "Traceback" not in done.stderr
    for words in says:
        assert words in done.stderr


@pytest.mark.parametrize(
    ("amount", "says"),
    [
        ("4Gb", "did you mean Gi or G?"),
        ("4XB", "unknown unit"),
        ("0", "zero"),
        ("5", "did you mean 5Gi?"),
        ("-4Gi", "negative"),
        ("NaN", "not a number"),
        ("", "empty"),
        ("99999999999Gi", "more than any device"),
        ("101%", "whole device"),
    ],
)
def test_amounts(allot: Allot, amount: str, says: str) -> None:
    refused(allot(*RUN, amount, "--", "true"), 2, says)
    assert not (allot.state / "shares").exists()


def test_how_much_memory_is_all_of_it(allot: Allot) -> None:
    refused(allot(*RUN[:-1], "--compute", "30", "--", "true"), 2, "missing --memory", "100%")
    assert allot(*RUN, "100%", "--compute", "30", "--", "true").returncode == 0


def test_more_than_any_gpu_has(allot: Allot) -> None:
    done = allot(*RUN, "90Gi", "--", "true")
    refused(done, 3, "need 90Gi, have", "even when empty")
    assert done.stderr.count("GPU-") == 2
    assert list((allot.state / "shares").iterdir()) == []


def test_more_gpus_than_there_are(allot: Allot) -> None:
    refused(allot(*RUN, "1Gi", "--count", "3", "--", "true"), 3, "has 2 GPUs")


@pytest.mark.parametrize("gpu", ["GPU-ffffffff", "h100", "0"])
def test_an_unknown_gpu(allot: Allot, gpu: str) -> None:
    refused(allot(*RUN, "1Gi", "--gpu", gpu, "--", "true"), 4, repr(gpu), "NVIDIA A100")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["run", "--memory", "1Gi"], "missing command"),
        (["run", "--", "true"], "--memory"),
        (["run", "--memory", "1Gi", "--count", "0", "--", "true"], "--count"),
        (["run", "--compute", "30", "--", "true"], "--memory"),
        (["run", "--memory", "1Gi", "--computing", "30", "--", "true"], "No such option"),
        (["run", "--memory", "1Gi", "--weight", "0", "--", "true"], "not a weight"),
        (["run", "--memory", "1Gi", "--class", "fast", "--", "true"], "latency"),
        (["resize", "train"], "nothing to change"),
        (["resize", "train", "--weight", "2", "--host-memory", "1Gi"], "a new --memory"),
        (["rn"], "did you mean `allot run`?"),
        (["env"], "missing --simulated"),
        (["run", "--simulated", "a100-80", "--memory", "1Gi", "--", "true"], "a100-80gb"),
        (["run", "--simulated", "t4", "--name", "a/b", "--memory", "1Gi", "--", "true"], "name"),
        (["top", "--sort", "colour"], "colour"),
    ],
)
def test_usage(allot: Allot, arguments: list[str], says: str) -> None:
    refused(allot(*arguments), 2, says)


@pytest.mark.parametrize(
    "command",
    [["run", "--memory", "1Gi"], ["resize", "train"], ["cdi", "create", "--memory", "9%"]],
)
def test_compute_is_asked_for_once(allot: Allot, command: list[str]) -> None:
    done = allot(*command, "--compute", "30", "--compute", "40")
    refused(done, 2, "--compute is given 2 times")


@pytest.mark.parametrize(
    "arguments", [["rm", "none"], ["resize", "none", "--memory", "1Gi"], ["cdi", "rm", "none"]]
)
def test_no_such_share(allot: Allot, arguments: list[str]) -> None:
    refused(allot(*arguments), 4, "'none'")


def test_no_gpu_and_nothing_simulated(allot: Allot) -> None:
    if Path("/proc/driver/nvidia/version").exists():
        pytest.skip("there is a GPU here")
    for command in (["devices"], ["run", "--memory", "1Gi", "--", "true"]):
        refused(allot(*command), 5, "--simulated")


def test_a_newer_state_folder_is_left_alone(allot: Allot) -> None:
    (allot.state / "version").write_text("9\n")
    for command in (["ps"], [*RUN, "1Gi", "--", "true"], ["rm", "x"], ["devices"]):
        refused(allot(*command), 6, "newer", "upgrade")
    assert [path.name for path in allot.state.iterdir()] == ["version"]


def test_a_damaged_share_is_shown_and_can_be_removed(allot: Allot) -> None:
    made = allot("cdi", "create", "--simulated", "t4", "--memory", "1Gi", "--name", "bad",
                 "--cdi-dir", allot.state / "cdi")  # fmt: skip
    assert made.returncode == 0, made.stderr
    allot("cdi", "create", "--simulated", "t4", "--memory", "1Gi", "--name", "good",
          "--cdi-dir", allot.state / "cdi")  # fmt: skip
    documents = json.loads(allot("ps", "-o", "json").stdout)["shares"]
    broken = next(each for each in documents if each["name"] == "bad")
    usage = allot.state / "shares" / broken["id"] / "usage"
    usage.write_bytes(usage.read_bytes()[:1000])
    shown = allot("ps")
    assert shown.returncode == 0
    assert "good" in shown.stdout
    assert str(usage) in shown.stderr
    assert "allot rm" in shown.stderr
    refused(allot("resize", "bad", "--memory", "2Gi"), 6, str(usage))
    assert allot("resize", "good", "--memory", "2Gi").returncode == 0
    assert allot("rm", "bad").returncode == 0
    assert [each["name"] for each in json.loads(allot("ps", "-o", "json").stdout)["shares"]] == [
        "good"
    ]


def mounted(allot: Allot, options: str, *arguments: str) -> "subprocess.CompletedProcess[str]":
    """Run a command with its state folder on a small file system of its own."""
    if not can_unshare():
        pytest.skip("needs CAP_SYS_ADMIN")
    script = f'mount -t tmpfs -o {options} none "$0" && exec "$@"'
    return subprocess.run(
        ["unshare", "--mount", "sh", "-c", script, allot.state, *allot.command(*arguments)],
        capture_output=True,
        text=True,
        check=False,
        env=allot.environment(),
        timeout=50,
    )


def test_a_read_only_file_system(allot: Allot) -> None:
    done = mounted(allot, "ro", *RUN, "1Gi", "--", "true")
    refused(done, 6, str(allot.state), "--state")


@pytest.mark.parametrize(
    "size",
    ["4k", *(pytest.param(each, marks=pytest.mark.thorough) for each in ("16k", "100k")), "700k"],
)
def test_a_full_disk(allot: Allot, size: str) -> None:
    done = mounted(allot, f"size={size}", *RUN, "1Gi", "--", "true")
    refused(done, 6, "No space left on device", "--state")


@pytest.mark.parametrize(
    "words",
    [
        ("--help",),
        ("ps", "-o", "json"),
        ("run", "--help"),
        ("mig", "export", "--simulated", "h100-80gb"),
        ("devices", "--simulated", "t4", "-o", "json"),
        ("completion", "bash"),
        ("env", "--simulated", "t4", "--", "seq", "1"),
    ],
    ids=" ".join,
)
def test_output_into_a_closed_pipe_ends_a_command_silently(
    allot: Allot, words: tuple[str, ...]
) -> None:
    """As with other tools: by SIGPIPE, or with the status that a shell shows for that."""
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "wb") as output:
        done = subprocess.run(
            allot.command(*words),
            stdout=output,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
            env=allot.environment(),
        )
    assert done.stderr == ""
    assert done.returncode in {141, -signal.SIGPIPE}


def test_colour_only_where_it_is_wanted(allot: Allot) -> None:
    assert "\x1b" not in allot("rm", "x").stderr
    assert "\x1b" not in allot("devices", "--simulated", "t4").stdout


def test_a_break_in_the_first_moment_is_no_crash(allot: Allot) -> None:
    code = """
import sys
class Break:
    def find_spec(self, name, *rest):
        if name == "allotment.cli.groups":
            raise KeyboardInterrupt
sys.meta_path.insert(0, Break())
import allotment.__main__
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=allot.environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_the_module_is_the_command(allot: Allot) -> None:
    version = allot("--version").stdout
    assert version.startswith("allot ")
    script = Path(sys.executable).parent / "allot"
    if script.exists():
        done = subprocess.run([script, "--version"], capture_output=True, text=True, check=True)
        assert done.stdout == version


@pytest.mark.parametrize(
    "target", [">/dev/full", ">&-", pytest.param(">&- <&-", marks=pytest.mark.thorough)]
)
@pytest.mark.parametrize(
    "arguments",
    [
        ["ps", "-o", "json"],
        pytest.param(["devices", "--simulated", "t4"], marks=pytest.mark.thorough),
        ["top", "--once"],
        ["--help"],
        pytest.param(["completion", "bash"], marks=pytest.mark.thorough),
    ],
)
def test_output_that_cannot_be_written_is_an_error_in_one_line(
    allot: Allot, target: str, arguments: list[str]
) -> None:
    command = subprocess.list2cmdline(allot.command(*arguments))
    done = subprocess.run(
        ["bash", "-c", f"{command} {target}"],
        capture_output=True,
        text=True,
        check=False,
        env=allot.environment(),
    )
    assert done.returncode == 1
    assert done.stderr.startswith("error: cannot write to standard output: ")
    assert done.stderr.count("\n") == 1


def test_a_command_has_its_streams_as_they_were_given(allot: Allot) -> None:
    command = subprocess.list2cmdline(allot.command(*RUN, "1Gi", "--", "ls", "/proc/self/fd"))
    done = subprocess.run(
        ["bash", "-c", f"{command} 2>&1 >&- <&-; echo $?"],
        capture_output=True,
        text=True,
        check=True,
        env=allot.environment(),
    )
    assert "Bad file descriptor" in done.stdout
    assert "Traceback" not in done.stdout


def test_a_part_of_nearly_nothing(allot: Allot) -> None:
    refused(allot(*RUN, "0.0001%", "--", "true"), 2, "less than 1Mi")
    assert list((allot.state / "shares").iterdir()) == []
    made = allot("cdi", "create", "--simulated", "t4", "--memory", "1Gi", "--name", "a",
                 "--cdi-dir", allot.state / "cdi")  # fmt: skip
    assert made.returncode == 0, made.stderr
    refused(allot("resize", "a", "--memory", "0.001"), 2, "did you mean 0.001Gi?")
    refused(allot("resize", "a", "--memory", "0.0001%"), 2, "less than 1Mi")


@pytest.mark.parametrize("spec", ["t4:0", "t4:-1", "t4:9999", "t4:9,t4:9"])
def test_a_count_that_cannot_be_says_what_can(allot: Allot, spec: str) -> None:
    refused(allot("devices", "--simulated", spec), 2, "16")


def test_a_count_of_a_file_that_cannot_be(allot: Allot, tmp_path: Path) -> None:
    (tmp_path / "m.yaml").write_text("gpus: [{model: t4, count: 1e9}]\n")
    refused(allot("devices", "--simulated", tmp_path / "m.yaml"), 2, "16")


@pytest.mark.parametrize("length", [1000, 3000])
def test_a_path_that_the_ledger_cannot_hold(allot: Allot, length: int) -> None:
    folder = str(allot.state) + "/xxxxxxxxx" * ((length - len(str(allot.state))) // 10 + 1)
    done = allot("run", *RUN[1:], "1Gi", "--state", folder, "--", "true")
    refused(done, 6, "bytes", "--state")
    assert list(allot.state.iterdir()) == []


def test_the_longest_path_that_can_be(allot: Allot) -> None:
    folder = (str(allot.state) + "/xxxxxxxxx" * 100)[:960]
    assert allot("run", *RUN[1:], "1Gi", "--state", folder, "--", "true").returncode == 0
