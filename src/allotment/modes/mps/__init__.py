# SPDX-License-Identifier: Apache-2.0
"""The mode `mps`: kernels of several shares run on a GPU at the same time.

mode        a ledger for memory, no turns; limits, and the variables that programs get
state       the files of a GPU's control daemon, and its status
control     the driver's program, `nvidia-cuda-mps-control`, by each of its protocols
daemons     one GPU's control daemon as a process, and the pipe directory of each share
gpu_access  the GPU kept for MPS clients by its compute mode
supervisor  keeps the daemon running: a step machine
"""
