# SPDX-License-Identifier: Apache-2.0
"""Placement over a cluster, as arrays: which nodes fit a pod, the best first. Needs numpy."""
