# SPDX-License-Identifier: Apache-2.0
"""MIG on one machine: slices that outlive no crash, and configurations that touch what differs.

mode         the mode `mig`: what a share in a slice has in its directory
records      what is written down about a slice before each step
journal      where it is written: one folder for each GPU, one file for each slice
judging      what a record stands for after a crash, by what the driver shows: pure
slices       make, hand out, take back and remove slices of one GPU
files        NVIDIA's file of configurations (mig-parted), read and written
applying     a configuration against the GPUs that there are: plan, then do
"""
