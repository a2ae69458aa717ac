# SPDX-License-Identifier: Apache-2.0
"""The kernel that every burn launches, as PTX text.

PTX ISA 6.0 for sm_50 is translated by every driver since CUDA 9 for every GPU that it knows, so
one text serves all. The kernel watches the GPU's nanosecond clock, hence takes the same time on
any model and at any clock rate; while a time slice belongs to another process it does not run,
but the clock does, as for any other wall-clock deadline.
"""

from __future__ import annotations

from typing import Final

SPIN_ENTRY: Final = b"allot_spin"

SPIN_PTX: Final = b"""\
.version 6.0
.target sm_50
.address_size 64

.visible .entry allot_spin(
    .param .u64 allot_spin_nanoseconds
)
{
    .reg .pred %p<2>;
    .reg .b64 %rd<5>;

    ld.param.u64 %rd1, [allot_spin_nanoseconds];
    mov.u64 %rd2, %globaltimer;
spin:
    mov.u64 %rd3, %globaltimer;
    sub.s64 %rd4, %rd3, %rd2;
    setp.lt.u64 %p1, %rd4, %rd1;
    @%p1 bra spin;
    ret;
}
"""
