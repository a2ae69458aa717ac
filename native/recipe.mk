# SPDX-License-Identifier: Apache-2.0
# What the native libraries are made of: the one list that both builds read.
#   native/Makefile          for developers and sanitizers: incremental, any compiler
#   tools/build_native.py    for wheels and `make native`: needs no make and no compiler but ziglang
# Keep to `name = words` on one line each: the second reader is ten lines of Python.
# Patterns may match nothing. Paths are relative to this folder.

libraries = shim ledger cuda nvml mps smi

shim.output = liballotment-shim.so
shim.sources = ledger.c lease.c lease_places.c neighbours.c lease_core.c lease_view.c shim/*.c shim/*.S
# Preloaded libraries are never unloaded; without NODELETE a dlclose in a host program could try.
shim.ldflags = -shared -Wl,-soname,liballotment-shim.so -Wl,-z,nodelete

ledger.output = liballotment-ledger.so
ledger.sources = ledger.c lease.c lease_places.c neighbours.c lease_core.c lease_view.c contract.c bus_guard.c
# Python calls allot_ledger_* here; inside the shim the same functions stay hidden.
ledger.cflags = -fvisibility=default -DALLOT_BUS_GUARD
ledger.ldflags = -shared -Wl,-soname,liballotment-ledger.so

cuda.output = simulated/libcuda.so.1
cuda.sources = simulated/engine/*.c simulated/cuda/*.c
cuda.ldflags = -shared -Wl,-soname,libcuda.so.1

nvml.output = simulated/libnvidia-ml.so.1
nvml.sources = simulated/engine/*.c simulated/nvml/*.c
nvml.ldflags = -shared -Wl,-soname,libnvidia-ml.so.1

# A program, and no library: the control daemon of MPS, its server, and what commands are given by.
mps.output = simulated/nvidia-cuda-mps-control
mps.sources = simulated/engine/*.c simulated/mps/*.c simulated/cuda/visible.c simulated/cuda/mps_protocol.c
mps.ldflags = -pie

# A program, too. It opens NVML by its name, as every program does.
smi.output = simulated/nvidia-smi
smi.sources = simulated/smi/*.c
smi.ldflags = -pie

cflags = -std=c11 -D_GNU_SOURCE -O2 -fPIC -fvisibility=hidden -Wall -Wextra -Wconversion -Wno-unused-parameter -Werror -I. -Iinclude
# The ledger changes two words in one compare-and-swap; without this the compiler calls libatomic.
x86_64.cflags = -mcx16
aarch64.cflags = -mno-outline-atomics
ldflags = -Wl,-z,relro -Wl,-z,now -Wl,-z,noexecstack -Wl,--as-needed
# Sanitizer runtimes live in the host program, so only other builds can insist on no undefined symbol.
plain.ldflags = -Wl,-z,defs
libs = -lpthread -ldl -lrt
