# SPDX-License-Identifier: Apache-2.0
"""The price table."""

from __future__ import annotations

import pytest

from allotment.cost.prices import price_of_text, prices_of
from allotment.model.errors import UsageError

A100 = "NVIDIA A100-SXM4-80GB"


def test_the_first_words_that_match_count() -> None:
    prices = prices_of({"A100-80gb": 2.5, "a100": 1.1, "l4": 0.7}, "EUR")
    assert prices.of(A100) == 2_500_000
    assert prices.of("NVIDIA A100-SXM4-40GB") == 1_100_000
    assert prices.of("NVIDIA L40S") is None
    assert prices.unused([A100]) == ["l4"]  # a model that another entry serves is there, too


@pytest.mark.parametrize("price", [-1, float("nan"), float("inf"), 1e7])
def test_what_is_no_price_is_refused(price: float) -> None:
    with pytest.raises(UsageError, match="is no price of a GPU hour"):
        prices_of({"a100": price})


@pytest.mark.parametrize("model", ["", "-", "GPU-7ca1b2a4"])
def test_what_is_no_model_is_refused(model: str) -> None:
    with pytest.raises(UsageError, match="is no model"):
        prices_of({model: 1})


def test_a_currency_is_a_short_word() -> None:
    assert prices_of({}, "credits").currency == "credits"
    for text in ("a b", 'a"', "x" * 13):
        with pytest.raises(UsageError, match="is no currency"):
            prices_of({}, text)


def test_prices_of_the_command_line() -> None:
    assert price_of_text("a100-80gb=2.5") == ("a100-80gb", 2.5)
    for text in ("a100=x", "a100=1,5"):
        with pytest.raises(UsageError, match="MODEL=PRICE"):
            price_of_text(text)
    with pytest.raises(UsageError, match="MODEL=PRICE"):
        price_of_text("a100")
