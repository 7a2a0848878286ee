"""The kernels themselves, as PTX: a loop of work, once (``qgpu_fma``) or again and again (``qgpu_persistent``).

Decides what a thread does and what a persistent kernel and its host say to each other; how many threads there are and
how often they go round is kernel.py's matter.
"""

from __future__ import annotations

#: One round of work: ``%f1`` stays positive, which the compiler cannot know, so ``sink`` is never written.
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
    .reg .pred %p<5>;
    .reg .b32 %r<6>;
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
#: After each round the first thread of every block looks for ``stop`` and tells its block; that of the first block
#: counts. Host memory is read once a block and round, so that looking costs nothing beside the round.
_AGAIN = """
    setp.ne.u32 %p3, %r2, 0;
    @%p3 bra TOLD;
    ld.volatile.global.u32 %r3, [%rd3];
    st.shared.u32 [told], %r3;
    mov.u32 %r5, %ctaid.x;
    setp.ne.u32 %p4, %r5, 0;
    @%p4 bra TOLD;
    add.u32 %r4, %r4, 1;
    st.volatile.global.u32 [%rd3+{rounds}], %r4;
TOLD:
    bar.sync 0;
    ld.shared.u32 %r3, [told];
    bar.sync 0;
    setp.eq.u32 %p3, %r3, 0;
    @%p3 bra ROUND;
"""
#: Where in the mailbox of a persistent kernel, in 32-bit words: ``stop`` for it to read, and the rounds it has done.
STOP, ROUNDS, MAILBOX_WORDS = 0, 32, 64

PTX = (
    """
.version 7.0
.target sm_70
.address_size 64

.visible .entry qgpu_fma(.param .u64 sink, .param .u32 iterations)
"""
    + _BEGIN
    + _LOOP
    + _END
    + """
.visible .entry qgpu_persistent(.param .u64 sink, .param .u32 iterations, .param .u64 mailbox)
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
