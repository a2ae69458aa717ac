# SPDX-License-Identifier: Apache-2.0
"""`allotment.agent.health.xids`: NVIDIA's catalogue, overrides, NVIDIA's variables."""

from __future__ import annotations

from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from allotment.agent.config.schema import HealthConfig
from allotment.agent.health.xids import (
    CATALOGUE,
    DISABLE_VARIABLE,
    ENABLE_VARIABLE,
    Action,
    Effect,
    XidPolicy,
    catalogue_action,
    describe_xid,
    parse_action,
    policy_of,
)
from allotment.model.errors import UsageError


@pytest.mark.parametrize(
    ("xid", "action"),
    [
        (13, Action.RESTART_APP),
        (31, Action.RESTART_APP),
        (43, Action.IGNORE),
        (45, Action.IGNORE),
        (48, Action.RESET_GPU),
        (63, Action.IGNORE),
        (64, Action.RESET_GPU),
        (74, Action.RESET_GPU),
        (79, Action.RESTART_NODE),
        (92, Action.IGNORE),
        (94, Action.RESTART_APP),
        (95, Action.RESET_GPU),
        (109, Action.RESET_GPU),
        (119, Action.RESET_GPU),
        (142, Action.CONTACT_SUPPORT),
        (145, Action.TEST),
        (154, Action.TEST),
        pytest.param(56, Action.CONTACT_SUPPORT, id="unused since Volta"),
        pytest.param(900, Action.TEST, id="newer than the catalogue"),
    ],
)
def test_the_catalogue_says_what_to_do(xid: int, action: Action) -> None:
    assert XidPolicy().action(xid) is action


def test_every_row_of_the_catalogue_has_an_action_and_a_meaning() -> None:
    assert len(CATALOGUE) > 100
    for xid, (_, meaning) in CATALOGUE.items():
        assert isinstance(catalogue_action(xid).effect, Effect)
        assert meaning in describe_xid(xid)


@pytest.mark.parametrize("action", Action)
def test_an_action_is_read_by_its_own_name(action: Action) -> None:
    assert parse_action(action.value) is action
    assert parse_action(action.value.upper()) is action
    assert action.words


@pytest.mark.parametrize(
    ("text", "action"),
    [
        ("RESET_GPU", Action.RESET_GPU),
        ("RESTART_BM", Action.RESTART_NODE),
        ("XID_154", Action.TEST),
    ],
)
def test_so_it_is_by_nvidias(text: str, action: Action) -> None:
    assert parse_action(text) is action


def test_another_name_is_refused_with_the_nearest() -> None:
    with pytest.raises(UsageError, match="there is no action 'reset-gpus'") as caught:
        parse_action("reset-gpus")
    assert caught.value.hint == "did you mean reset-gpu?"


@given(st.text())
def test_whatever_is_written_is_an_action_or_refused(text: str) -> None:
    with suppress(UsageError):
        assert parse_action(text) in Action


def policy(disable: str = "", enable: str = "", *xids: tuple[int, str]) -> XidPolicy:
    environment = {DISABLE_VARIABLE: disable, ENABLE_VARIABLE: enable}
    return policy_of(HealthConfig(xid_actions=xids), environment)


def test_the_file_overrides_the_catalogue() -> None:
    assert policy("", "", (31, "reset-gpu")).action(31) is Action.RESET_GPU
    assert policy("", "", (95, "ignore")).action(95) is Action.IGNORE


def test_disabled_xids_are_ignored_whatever_the_file_says() -> None:
    found = policy("95, 48", "", (95, "reset-gpu"))
    assert found.action(95) is Action.IGNORE
    assert found.action(48) is Action.IGNORE
    assert found.action(79) is Action.RESTART_NODE


@pytest.mark.parametrize("word", ["all", "xids", "ALL", "31,xids"])
def test_all_can_be_disabled_and_one_enabled_again(word: str) -> None:
    assert policy(word).action(95) is Action.IGNORE
    found = policy(word, "79,31")
    assert found.action(79) is Action.RESTART_NODE
    assert found.action(31) is Action.TAKE_OUT, "enabled by name: it takes the GPU out"
    assert found.action(95) is Action.IGNORE


def test_enabling_all_disables_none() -> None:
    found = policy("95", "all")
    assert found.action(95) is Action.RESET_GPU
    assert found.action(31) is Action.RESTART_APP


def test_all_switches_health_off_and_xids_only_xids() -> None:
    assert policy("all").is_off
    assert not policy("xids").is_off
    assert not policy("all", "79").is_off
    assert not policy().is_off


def test_what_is_no_number_is_passed_over_with_a_note() -> None:
    found = policy("95,many", "-1")
    assert found.disabled == {95}
    assert found.notes == (
        "DP_DISABLE_HEALTHCHECKS: 'many' is no XID, and is ignored",
        "DP_ENABLE_HEALTHCHECKS: '-1' is no XID, and is ignored",
    )


def test_an_unknown_action_of_the_file_is_refused() -> None:
    with pytest.raises(UsageError):
        policy("", "", (31, "explode"))
