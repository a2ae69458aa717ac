# SPDX-License-Identifier: Apache-2.0
"""The authority: what is made when, and that whoever trusts the bundle trusts what is served."""

from __future__ import annotations

from datetime import timedelta

import pytest
from certificates_twin import DAY, HOUR, LIVES, NAMES, NOW, client_step, first, step
from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from allotment.model.errors import UsageError
from allotment.scheduler.tls.authority import Lives, Signed, next_set, read_set
from allotment.scheduler.tls.rotation import service_names


def test_what_was_made_needs_nothing_for_two_thirds_of_its_life() -> None:
    kept = first()
    assert step(kept, NOW) is None
    assert step(kept, NOW + 19 * DAY) is None
    renewed = step(kept, NOW + 21 * DAY)
    assert renewed is not None
    assert renewed.server.certificate != kept.server.certificate
    assert renewed.server.key != kept.server.key
    assert renewed.authority == kept.authority
    assert renewed.bundle == kept.bundle


def test_another_name_is_another_certificate() -> None:
    kept = first()
    renewed = next_set(NOW, names=("other",), kept=kept, lives=LIVES)
    assert renewed is not None
    assert renewed.authority == kept.authority
    assert next_set(NOW, names=("other",), kept=renewed, lives=LIVES) is None


def test_a_new_authority_is_known_before_it_signs_and_the_old_one_until_it_ends() -> None:
    kept = first()
    now = NOW + 70 * DAY
    told = step(kept, now)
    assert told is not None
    assert told.successor is not None
    assert told.authority == kept.authority
    assert told.bundle.count(b"BEGIN") == 2
    assert step(told, now + HOUR / 2) is None
    signing = step(told, now + HOUR)
    assert signing is not None
    assert signing.authority == told.successor
    assert signing.successor is None
    assert signing.bundle.count(b"BEGIN") == 2
    signing.server.parsed().verify_directly_issued_by(signing.authority.parsed())
    later = step(signing, NOW + 101 * DAY)
    assert later is not None
    assert later.bundle == later.authority.certificate


def test_nothing_that_has_ended_is_gone_on_with() -> None:
    kept = first()
    anew = step(kept, NOW + 200 * DAY)
    assert anew is not None
    assert anew.authority != kept.authority
    assert anew.bundle == anew.authority.certificate


def test_a_clock_that_is_behind_or_ahead_by_half_an_hour_changes_nothing() -> None:
    kept = first()
    for wrong in (-HOUR / 2, HOUR / 2):
        assert step(kept, NOW + wrong) is None


def test_what_a_clock_far_ahead_has_made_is_made_anew() -> None:
    kept = first(NOW + 30 * DAY)
    anew = step(kept, NOW)
    assert anew is not None
    assert anew.authority.parsed().not_valid_before_utc <= NOW
    # And whoever is ahead leaves that alone.
    assert step(anew, NOW + 2 * HOUR) is None


def test_certificates_say_what_they_are_for() -> None:
    kept = first()
    assert kept.authority.parsed().not_valid_before_utc == NOW - HOUR
    assert kept.authority.parsed().not_valid_after_utc == NOW + 100 * DAY
    assert kept.server.parsed().not_valid_after_utc == NOW + 30 * DAY
    assert service_names("a", "b") == ("a.b", "a.b.svc")


def test_what_is_kept_is_read_again() -> None:
    kept = first()
    assert read_set(kept.as_data()) == kept
    both = step(kept, NOW + 70 * DAY)
    assert both is not None
    assert read_set(both.as_data()) == both


@pytest.mark.parametrize("key", ["ca.crt", "ca.key", "tls.crt", "tls.key", "bundle.crt"])
@pytest.mark.parametrize("damage", [None, b"", b"junk"], ids=["missing", "empty", "junk"])
def test_what_is_damaged_is_said(key: str, damage: bytes | None) -> None:
    data = first().as_data()
    if damage is None:
        del data[key]
    else:
        data[key] = damage
    with pytest.raises(UsageError) as caught:
        read_set(data)
    assert "cannot be read" in caught.value.message


def test_a_key_of_another_certificate_is_damage() -> None:
    data = first().as_data() | {"tls.key": first().server.key}
    with pytest.raises(UsageError) as caught:
        read_set(data)
    assert "does not belong" in caught.value.message


@settings(max_examples=examples(1 / 4))
@given(st.lists(st.floats(0.01, 40), min_size=1, max_size=12))
def test_at_every_look_what_is_served_is_trusted_by_the_bundle_of_the_look_before(
    days: list[float],
) -> None:
    """However rarely somebody looks, as long as it is often enough for the certificate's life."""
    lives = Lives(authority=40 * DAY, server=8 * DAY, overlap=HOUR)
    now, kept = NOW, first(NOW, lives)
    for each in days:
        passed = timedelta(days=min(each, 2.5))
        now += passed
        before = kept
        while (changed := next_set(now, names=NAMES, kept=kept, lives=lives)) is not None:
            kept = changed
        server = kept.server.parsed()
        assert server.not_valid_before_utc <= now < server.not_valid_after_utc
        trusted = before.bundle if passed > HOUR else kept.bundle
        issuers = [
            one
            for one in read_authorities(trusted)
            if one.parsed().public_key() == kept.authority.parsed().public_key()
        ]
        assert issuers or kept.authority == before.successor or passed <= 2 * HOUR


def read_authorities(bundle: bytes) -> list[Signed]:
    marker = b"-----END CERTIFICATE-----\n"
    return [Signed(part + marker, b"") for part in bundle.split(marker) if part]


def test_kube_scheduler_s_certificate_is_renewed_like_the_server_s() -> None:
    kept = first()
    made = client_step(kept, {})
    assert made is not None
    assert set(made) == {"tls.crt", "tls.key", "ca.crt"}
    assert kept.authority.key not in made.values()
    assert client_step(kept, made) is None
    assert client_step(kept, made, NOW + 19 * DAY) is None
    renewed = client_step(kept, made, NOW + 21 * DAY)
    assert renewed is not None
    assert renewed["tls.crt"] != made["tls.crt"]
    # Another bundle is written beside the same certificate, another authority signs anew.
    both = step(kept, NOW + 70 * DAY)
    assert both is not None
    recent = client_step(kept, {}, NOW + 70 * DAY)
    told = client_step(both, recent or {}, NOW + 70 * DAY)
    assert told == {**(recent or {}), "ca.crt": both.bundle}
    other = client_step(first(), made)
    assert other is not None
    assert other["tls.crt"] != made["tls.crt"]


@pytest.mark.parametrize("key", ["tls.crt", "tls.key"])
@pytest.mark.parametrize("damage", [None, b"", b"junk"], ids=["missing", "empty", "junk"])
def test_what_is_damaged_of_kube_scheduler_s_is_made_anew(key: str, damage: bytes | None) -> None:
    kept = first()
    found = client_step(kept, {}) or {}
    if damage is None:
        del found[key]
    else:
        found[key] = damage
    made = client_step(kept, found)
    assert made is not None
    assert client_step(kept, made) is None
