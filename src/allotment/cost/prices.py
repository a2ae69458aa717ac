# SPDX-License-Identifier: Apache-2.0
"""The price of a GPU hour, by model. No currency is converted."""

import math
import re
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from typing import Final

import msgspec

from allotment.model.errors import UsageError
from allotment.placement import model_matches

MICROS: Final = 1_000_000
"""Of one unit of currency. Prices are whole numbers of them, so that sums are exact."""
_MOST: Final = 1_000_000
"""No GPU costs more an hour, in any currency."""
_CURRENCY: Final = re.compile(r"[^\s\"\\]{1,12}")
_WORD: Final = re.compile(r"[a-z0-9]", re.ASCII | re.IGNORECASE)
_MODELS_HINT: Final = "write words of its name, like a100-80gb or rtx4090"


class Prices(msgspec.Struct, frozen=True):
    """Prices of an hour, in millionths of a unit of `currency`."""

    micros: tuple[tuple[str, int], ...] = ()
    """By words of the model's name: the first that match count."""
    currency: str = ""
    """As it is shown; empty: none."""

    def of(self, model: str) -> int | None:
        """Return the price of a model, by its full name; None: it has none."""
        found = (price for words, price in self.micros if model_matches(model, words))
        return next(found, None)

    def unused(self, models: Iterable[str]) -> list[str]:
        """Return the words that match none of these models."""
        known = list(models)
        return [
            words for words, _ in self.micros if not any(model_matches(m, words) for m in known)
        ]


def prices_of(amounts: Mapping[str, float], currency: str = "") -> Prices:
    """Check prices, by words of a model's name. Raises `UsageError`."""
    if currency and not _CURRENCY.fullmatch(currency):
        raise UsageError(
            f"{currency!r} is no currency", hint="write at most 12 characters, like EUR"
        )
    for model, price in amounts.items():
        # A text that begins like a UUID is one.
        if not _WORD.search(model) or model.lower().startswith(("gpu-", "mig-")):
            raise UsageError(f"{model!r} is no model", hint=_MODELS_HINT)
        if not (math.isfinite(price) and 0 <= price <= _MOST):
            raise UsageError(
                f"{model}: {price} is no price of a GPU hour", hint=f"write 0 to {_MOST}, like 2.5"
            )
    micros = tuple((model.lower(), round(price * MICROS)) for model, price in amounts.items())
    return Prices(micros, currency)


def price_of_text(text: str) -> tuple[str, float]:
    """Parse `MODEL=PRICE`. Raises `UsageError`."""
    model, _, price = text.rpartition("=")
    with suppress(ValueError):
        if model:
            return model.strip(), float(price)
    raise UsageError(f"{text!r} is no MODEL=PRICE", hint="write one like a100-80gb=2.5")


def listed(models: Mapping[str, int]) -> str:
    return ", ".join(f"{model} ({count})" for model, count in sorted(models.items()))


def unpriced_text(models: Mapping[str, int], without: Collection[str]) -> str:
    """Say which models have no price."""
    text = "no GPU has a price" if len(without) == len(models) else "some GPUs have no price"
    named = {model: models.get(model, 0) for model in without}
    return f"{text}; give --price MODEL=PRICE for {listed(named)}"
