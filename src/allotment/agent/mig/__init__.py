# SPDX-License-Identifier: Apache-2.0
"""MIG on the node: state, strategy, slices for pods, conflicts with other tools."""
