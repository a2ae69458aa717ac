# SPDX-License-Identifier: Apache-2.0
"""kube-scheduler's extender protocol: filter, prioritize, preempt, bind."""
