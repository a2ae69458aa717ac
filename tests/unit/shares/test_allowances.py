# SPDX-License-Identifier: Apache-2.0
"""What users of a machine get and may have, by its configuration."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from users import as_user

from allotment.model.allowances import Allowance
from allotment.model.compute import Compute, ComputeClass, parse_compute
from allotment.model.devices import Device
from allotment.model.errors import DoesNotFitError, StateError, UsageError
from allotment.model.quantities import parse_memory
from allotment.model.shares import Share
from allotment.shares import lifecycle
from allotment.shares.allowances import (
    allowance_of,
    check_folder,
    parse_config,
    read_config,
    unknown_names,
)
from allotment.shares.folders import RUN_FOLDER, StateFolder
from allotment.shares.placing import ShareOrder
from allotment.shares.resize import LimitChange, resize

SOURCE = "/etc/allotment/config.yaml"
TEXT = """\
version: v1
everyone:
  share: {memory: 25%, compute: 10:50}
  ceilings:
    memory: 50%
    compute: 30:60
    class: normal
    shares: 3
    oversubscribe: false
groups:
  daemon:
    ceilings: {memory: 75%}
users:
  nobody:
    share:
      memory: 1Gi
    ceilings: {shares: 1}
"""
DAEMON, NOBODY = 1, 65534
ME = os.geteuid()
AS_ROOT = pytest.mark.skipif(ME != 0, reason="only root writes the machine's configuration")


def test_the_user_s_own_value_counts_then_its_groups_then_everyone_s() -> None:
    config = parse_config(TEXT, source=SOURCE)
    daemon, nobody = config.allowance(DAEMON), config.allowance(NOBODY)
    assert (str(daemon.memory), str(daemon.most_memory), daemon.most_shares) == ("25%", "75%", 3)
    assert (str(nobody.memory), str(nobody.most_memory), nobody.most_shares) == ("1Gi", "50%", 1)
    assert nobody.place_of("most_shares") == f"{SOURCE}, line 17: users.nobody.ceilings.shares"
    assert daemon.place_of("most_memory") == f"{SOURCE}, line 12: groups.daemon.ceilings.memory"


def test_a_user_without_a_name_has_what_everyone_has_and_root_no_ceilings() -> None:
    config = parse_config(TEXT, source=SOURCE)
    assert str(config.allowance(4_000_001).most_memory) == "50%"
    root = config.allowance(0)
    assert (str(root), str(root.memory)) == ("none", "25%")


def test_names_that_the_machine_does_not_have_are_found() -> None:
    config = parse_config("version: v1\nusers: {nobdy: {}}\ngroups: {gpuz: {}}", source=SOURCE)
    assert list(unknown_names(config)) == ["user nobdy", "group gpuz"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("version: v2", "line 1: version: the version is missing, or unknown"),
        ("everyone: {}", "line 1: version: the version is missing, or unknown"),
        ("version: v1\neveryone:\n  ceiling: {}", "line 3: everyone.ceiling: unknown key"),
        ("version: v1\nusers:\n  a:\n    share: {memory: 4Gb}", "line 4: users.a.share.memory: "),
        ("version: v1\nusers: {a: {share: {compute: 80:30}}}", "line 2: users.a.share.compute: "),
        ("version: v1\nusers: [a]", "line 2: users: keys with values are expected here"),
        ("version: v1\nusers: {a: {ceilings: {class: hi}}}", "users.a.ceilings.class: 'hi' is"),
        ("version: v1\nusers: {a: {ceilings: {shares: [1]}}}", "users.a.ceilings.shares: "),
        ("version: v1\neveryone: {ceilings: {gpus: 0}}", "'0' is not a whole number from 1 to"),
        ("version: v1\neveryone: {ceilings: {oversubscribe: maybe}}", "'maybe' is none of"),
        ("a: [", "line 1: it is not YAML: "),
        ("version: v1\nversion: v1", "line 2: version: the key is given twice"),
        ("- version", "line 1: the file: keys with values are expected here"),
    ],
)
def test_a_mistake_is_named_with_its_file_and_line(text: str, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_config(text, source=SOURCE)
    assert caught.value.message.startswith(f"{SOURCE}, line ")
    assert message in caught.value.message
    assert caught.value.hint


def test_an_empty_file_sets_nothing() -> None:
    assert str(parse_config("# nothing yet\n", source=SOURCE).allowance(DAEMON)) == "none"


@AS_ROOT
@pytest.mark.parametrize(("owner", "mode"), [(DAEMON, 0o644), (0, 0o666), (0, 0o664)])
def test_a_file_that_others_could_change_is_refused(tmp_path: Path, owner: int, mode: int) -> None:
    path = tmp_path / "config.yaml"
    assert read_config(path) is None
    path.write_text(TEXT, "utf-8")
    path.chmod(0o644)
    assert allowance_of(DAEMON, path) == parse_config(TEXT, source=str(path)).allowance(DAEMON)
    path.chmod(mode)
    os.chown(path, owner, -1)
    with pytest.raises(StateError, match="other users than root could change the ceilings"):
        read_config(path)


def made(**values: object) -> Allowance:
    return Allowance(uid=ME, user="me", places={}, **values)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("values", "asked", "expected"),
    [
        ({}, {}, Compute()),
        ({"compute": parse_compute("10:50")}, {}, parse_compute("10:50")),
        ({"most_compute": parse_compute("30:60")}, {}, parse_compute("0:60")),
        ({"compute": parse_compute("10:90"), "most_compute": parse_compute("30:60")}, {}, "10:60"),
        ({"compute": parse_compute("10:50")}, {"compute": parse_compute("0:100")}, "0:100"),
    ],
)
def test_compute_that_was_not_asked_for_is_filled_in(
    values: dict[str, object], asked: dict[str, Compute], expected: Compute | str
) -> None:
    compute = made(**values).filled(asked.get("compute"), None, None)
    assert str(compute) == str(expected)
    assert compute.is_governed == bool(values)


def test_a_class_that_was_not_asked_for_is_lowered_to_the_ceiling() -> None:
    allowance = made(most_class=ComputeClass.BESTEFFORT)
    assert allowance.filled(None, None, None).kind is ComputeClass.BESTEFFORT
    assert allowance.filled(None, ComputeClass.LATENCY, None).kind is ComputeClass.LATENCY


@pytest.mark.parametrize(
    ("values", "asked", "message"),
    [
        ({"most_gpus": 1}, {"count": 2}, "need 2 GPUs in a share, may have 1"),
        ({"may_oversubscribe": False}, {"may_oversubscribe": True}, "need host memory"),
        ({"most_memory": parse_memory("25%")}, {}, "have"),
        ({"most_memory": parse_memory("2Gi")}, {}, "need 4Gi, have 2Gi"),
        (
            {"most_compute": parse_compute("30:60")},
            {"compute": parse_compute("0:100")},
            "need a ceiling of 100 % of compute, may have 60 %",
        ),
        (
            {"most_compute": parse_compute("30:60")},
            {"compute": parse_compute("40:60")},
            "need 40 % of guaranteed compute, may have 30 %",
        ),
        (
            {"most_class": ComputeClass.NORMAL},
            {"compute": Compute(kind=ComputeClass.LATENCY, is_governed=True)},
            "need class latency, may have normal",
        ),
    ],
)
def test_what_one_share_may_never_have_is_refused_at_once(
    folder: StateFolder,
    devices: tuple[Device, ...],
    order: Callable[..., ShareOrder],
    values: dict[str, object],
    asked: dict[str, object],
    message: str,
) -> None:
    memory = "4.5Gi" if values.get("most_memory") == parse_memory("25%") else "4Gi"
    with pytest.raises(UsageError, match="the ceiling of me") as caught:
        lifecycle.create(folder, order(memory, allowance=made(**values), **asked), devices)
    assert message in caught.value.message
    assert not [*folder.shares.iterdir()]


def test_all_shares_of_a_user_on_a_gpu_count_together(
    folder: StateFolder, devices: tuple[Device, ...], order: Callable[..., ShareOrder]
) -> None:
    allowance = made(most_memory=parse_memory("6Gi"), most_compute=parse_compute("50"))
    asked = {"allowance": allowance, "compute": parse_compute("30")}
    first, _ = lifecycle.create(folder, order("4Gi", **asked), devices)
    second, _ = lifecycle.create(folder, order("4Gi", **asked), devices)
    assert first.devices[0].uuid != second.devices[0].uuid  # the other GPU has room for this user
    with pytest.raises(DoesNotFitError, match="me may have no more of the GPUs"):
        lifecycle.create(folder, order("4Gi", **asked), devices)
    less = {**asked, "compute": parse_compute("20")}
    lifecycle.create(folder, order("2Gi", **less), devices)
    lifecycle.create(folder, order("8Gi"), devices)  # no allowance: the node agent's


def test_the_number_of_shares_is_limited(
    folder: StateFolder, devices: tuple[Device, ...], order: Callable[..., ShareOrder]
) -> None:
    allowance = made(most_shares=1)
    first, _ = lifecycle.create(folder, order("1Gi", allowance=allowance), devices)
    with pytest.raises(DoesNotFitError, match=rf"has 1 share \({first.name}\), may have 1"):
        lifecycle.create(folder, order("1Gi", allowance=allowance), devices)


@AS_ROOT
def test_shares_of_other_users_do_not_count(
    common_folder: Path,
    native_dir: Path,
    devices: tuple[Device, ...],
    order: Callable[..., ShareOrder],
) -> None:
    assert native_dir.is_dir()
    folder = StateFolder(common_folder)
    folder.prepare()

    def create(uid: int) -> Share:
        allowance = Allowance(uid=uid, user=str(uid), most_memory=parse_memory("4Gi"))
        with as_user(uid):
            return lifecycle.create(folder, order("4Gi", allowance=allowance), devices[:1])[0]

    create(DAEMON)
    create(NOBODY)
    for uid in (DAEMON, NOBODY):
        with pytest.raises(DoesNotFitError, match="may have no more of the GPUs"):
            create(uid)


def test_a_share_grows_up_to_its_user_s_ceilings_and_always_shrinks(
    folder: StateFolder, devices: tuple[Device, ...], order: Callable[..., ShareOrder]
) -> None:
    share, _ = lifecycle.create(folder, order("4Gi", compute=parse_compute("30:80")), devices)
    low = made(most_memory=parse_memory("3Gi"), most_compute=parse_compute("20:60"))

    def change(force: bool = False, **values: object) -> None:  # noqa: FBT001, FBT002
        wish = LimitChange(**values)  # type: ignore[arg-type]
        resize(folder, share.id, wish, devices, force=force, allowance=low)

    with pytest.raises(DoesNotFitError, match="the ceiling of me"):
        change(memory=parse_memory("5Gi"))
    with pytest.raises(UsageError, match="the ceiling of me"):
        change(compute=parse_compute("30:90"))
    with pytest.raises(DoesNotFitError, match="need 31 % of guaranteed compute, may have 20 %"):
        change(compute=parse_compute("31:50"))
    change(memory=parse_memory("3.5Gi"))
    change(compute=parse_compute("25:50"))


def test_real_gpus_are_shared_in_the_machine_s_folder_alone(tmp_path: Path) -> None:
    user = Allowance(uid=1000, user="alice", most_shares=2)
    free = Allowance(uid=0, user="root")
    check_folder(user, StateFolder(RUN_FOLDER), is_simulated=False)
    check_folder(user, StateFolder(tmp_path), is_simulated=True)
    check_folder(free, StateFolder(tmp_path), is_simulated=False)
    with pytest.raises(StateError, match="is not the state folder of this machine"):
        check_folder(user, StateFolder(tmp_path), is_simulated=False)
