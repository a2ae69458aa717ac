# SPDX-License-Identifier: Apache-2.0
"""MIG on one machine: crash-safe slices, and configurations.

mode      the mode `mig`: the files of a share in one MIG device
journal   one record for each slice of Allotment, and its instance after a crash
slices    make, bind, free and remove the slices of one GPU
files     NVIDIA's file of configurations (mig-parted)
apply     plan and apply a configuration
"""
