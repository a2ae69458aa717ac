# SPDX-License-Identifier: Apache-2.0
"""Allotment: a GPU shared exactly and visibly, among programs and containers.

The rooms and what each may know are in `docs/architecture.md`. Importing this package costs
nothing: `allot` has to start within 150 ms, so every room imports what it needs where it needs it.
"""

__all__ = ["__version__"]

__version__ = "0.1.0"
