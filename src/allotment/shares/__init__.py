# SPDX-License-Identifier: Apache-2.0
"""A share's life on one machine. `lifecycle.create` is the call that every front door ends in.

folders       the state folder: place, layout, version, lock; copies of the libraries
record        share.json and processes.json, and a share as read from its folder
lifecycle     create, find, end, destroy
recovery      list, remove, and clean up after dead processes
mode_lives    the operations of each mode beyond the share's folder
placing       an order, its modes in turn, and its placement
booking       the booked amounts of each device, and the guarantees in force
pods          the node agent's shares: prepare, end, tidy
run/          `allot run`
mig/          shares in MIG slices
status        shares as people and programs see them
process_tree  which processes live, and in which share
resize        other limits for a live share
suspend, resume, suspension  GPU memory set free and brought back
drain, mode_policy           which modes a GPU may have, and changing it
mps_daemons   a GPU's MPS control daemon, started and awaited
cdi           shares as CDI devices
failpoints    where tests end a process
"""
