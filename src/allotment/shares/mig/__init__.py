# SPDX-License-Identifier: Apache-2.0
"""Shares in MIG slices: allocate a slice, cut GPUs, read what is cut."""
