"""Reads words and reduces them, nothing else: the practical ceiling of a kernel that reads its weight once."""

# mypy: ignore-errors
import triton
import triton.language as tl


@triton.jit
def stream(words, out, count, BLOCK: tl.constexpr, EACH: tl.constexpr, WHOLE: tl.constexpr):
    """out[p] = xor of EACH blocks of BLOCK words; count words in all, WHOLE where that is a multiple of a program's."""
    program = tl.program_id(0).to(tl.int64)
    total = tl.zeros((BLOCK,), tl.int32)
    for i in range(EACH):
        at = (program * EACH + i) * BLOCK + tl.arange(0, BLOCK)
        if WHOLE:  # without a mask more loads are in flight
            total ^= tl.load(words + at)
        else:
            total ^= tl.load(words + at, mask=at < count, other=0)
    tl.store(out + program, tl.xor_sum(total, 0))
