# SPDX-License-Identifier: Apache-2.0
"""How MIG slices are planned, and how long that takes."""
