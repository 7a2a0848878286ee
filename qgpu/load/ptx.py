"""The kernels in PTX: a loop of work, run once (``qgpu_fma``) or in rounds (``qgpu_persistent``).

This module defines what a thread does and the mailbox protocol of a persistent kernel. kernel.py sets the number of
threads and iterations.
"""

from __future__ import annotations

#: One round of work. ``%f1`` stays positive, so ``sink`` is never written, but the compiler cannot know that.
_LOOP = (
    """
    ld.param.u32 %r1, [iterations];
LOOP:
"""
    + "    fma.rn.f32 %f1, %f1, %f2, %f3;\n" * 8
    + """
    sub.u32 %r1, %r1, 1;
    setp.ne.u32 %p1, %r1, 0;
    @%p1 bra LOOP;
"""
)
_BEGIN = """
{
    .reg .pred %p<6>;
    .reg .b32 %r<7>;
    .reg .f32 %f<4>;
    .reg .b64 %rd<5>;

    ld.param.u64 %rd1, [sink];
    mov.u32 %r2, %tid.x;
    cvt.rn.f32.u32 %f1, %r2;
    mov.f32 %f2, 0f3F7FBE77;
    mov.f32 %f3, 0f3A83126F;
"""
_END = """
    setp.lt.f32 %p2, %f1, 0f00000000;
    @!%p2 bra END;
    cvta.to.global.u64 %rd2, %rd1;
    st.global.f32 [%rd2], %f1;
END:
    ret;
}
"""
#: After each round the first thread of every block checks whether to stop and tells its block. Only the first block
#: reads that from host memory and counts rounds there; it tells the other blocks through the card's memory. If a
#: thousand blocks read host memory once a millisecond, the driver's own calls take twenty times as long
#: (docs/decisions/0027-slow-calls.md). With ``every``, all blocks read host memory.
_AGAIN = """
    setp.ne.u32 %p3, %r2, 0;
    @%p3 bra TOLD;
    mov.u32 %r5, %ctaid.x;
    setp.eq.u32 %p4, %r5, 0;
    @%p4 bra HOST;
    ld.param.u32 %r6, [every];
    setp.eq.u32 %p5, %r6, 0;
    @%p5 bra CARD;
HOST:
    ld.volatile.global.u32 %r3, [%rd3];
    @!%p4 bra TELL;
    st.volatile.global.u32 [stopped], %r3;
    add.u32 %r4, %r4, 1;
    st.volatile.global.u32 [%rd3+{rounds}], %r4;
    bra TELL;
CARD:
    ld.volatile.global.u32 %r3, [stopped];
TELL:
    st.shared.u32 [told], %r3;
TOLD:
    bar.sync 0;
    ld.shared.u32 %r3, [told];
    bar.sync 0;
    setp.eq.u32 %p3, %r3, 0;
    @%p3 bra ROUND;
"""
#: The mailbox of a persistent kernel, by index of 32-bit words: ``stop``, which it reads, and the rounds it has done.
STOP, ROUNDS, MAILBOX_WORDS = 0, 32, 64

PTX = (
    """
.version 7.0
.target sm_70
.address_size 64

.global .u32 stopped = 0;

.visible .entry qgpu_fma(.param .u64 sink, .param .u32 iterations)
"""
    + _BEGIN
    + _LOOP
    + _END
    + """
.visible .entry qgpu_persistent(.param .u64 sink, .param .u32 iterations, .param .u64 mailbox, .param .u32 every)
"""
    + _BEGIN
    + """
    .shared .b32 told;
    ld.param.u64 %rd4, [mailbox];
    cvta.to.global.u64 %rd3, %rd4;
    mov.u32 %r4, 0;
ROUND:
"""
    + _LOOP
    + _AGAIN.format(rounds=ROUNDS * 4)
    + _END
)
