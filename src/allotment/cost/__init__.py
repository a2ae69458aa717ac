# SPDX-License-Identifier: Apache-2.0
"""What GPUs cost, who uses what is paid for, and what each workload should ask for.

prices      price of a GPU hour, by model
splitting   the formula: what is paid, as parts that add up to it
workloads   the use of each workload, and the advice that follows from it
prometheus  queries
history     the hours of the past, from Prometheus: what `splitting` takes
peaks       the peaks of the past, likewise: what `workloads` takes
present     both of one machine's shares, without Prometheus

`splitting` and `workloads` are pure. docs/designs/watch.md has the reasons.
"""
