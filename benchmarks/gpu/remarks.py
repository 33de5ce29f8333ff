"""Why a target was missed: what limits the row and what was tried. Printed and shown only where a row misses it."""

_POWER = """
The three products take nine tenths of the step, at what seems to be the chip's power limit: the same kernel is no
slower than cuBLAS there. Tried: clusters that share an operand's tile, which are kept; smaller last tiles and
warpgroups in turns, which are not; a measured table of tiles, which chose the same ones for A. The rest are casts
near the rate of a copy, and the pass that looks for the largest magnitude, which delayed scaling does not need.
"""
_HISTORY = """
A step of this size is bound by launches. Delayed scaling adds five small programs of XLA for the history of each
tensor; its casts and products are those of current scaling.
"""
_PROMOTED = """
Sums of every 128 terms are multiplied and added in registers while other warpgroups multiply. Two warpgroups of
64 x 256 have too few registers for that, two of 64 x 128 idle together; three of 64 x 128 are what is measured here.
Tried and not kept: strict turns of two warpgroups, clusters. What it does beside the promoted product is load factors.
"""
_LINES = """
The product for the gradient of the kernel has a factor for each row and each column of every step, two multiplications
for a sum, and so is the slower one of the two products above; casts of lines search each line first.
"""
_INTEGERS = """
Integers are summed exactly, but every sum of 128 terms must be converted, at half the rate of a multiplication. With
that, a warpgroup spends about as long on a step as the tensor cores do for all three. Tried and not kept: sums that
start from the bits of 1.5 x 2^23, which need no conversion, but as many moves and one more addition; it was slower.
"""
_FEW_BYTES = """
The kernel alone takes 12 to 15 us, of which 10 remain when it only copies the weights: with so few bytes, starting and
the last tiles weigh as much as the rate of memory. The pass that adds parts of sums takes 1 to 3 us more, and of 132
multiprocessors only 112 have work where there are 14336 columns. A warpgroup that fetches for the others is no faster
than warpgroups that fetch for themselves.
"""
REMARKS: dict[tuple[str, str, str], str] = {
    ("dense", "A", "scaledot fp8_current"): _POWER,
    ("dense", "A", "scaledot fp8_delayed"): _POWER,
    ("dense", "A", "scaledot fp8_current, nn.Dense"): _POWER,
    ("dense", "B", "scaledot fp8_current"): _POWER,
    ("dense", "small", "scaledot fp8_delayed"): _HISTORY,
    ("block", "1x128 and 128x128", "scaledot"): _PROMOTED,
    ("block", "B", "scaledot fp8_block"): _LINES,
    ("block", "int8, 1x128 and 128x128", "scaledot"): _INTEGERS,
    ("block", "int8, 1x128 and 1x128", "scaledot"): _INTEGERS,
    ("decode", "4096 -> 14336, batch 1", "scaledot int4 in groups of 128"): _FEW_BYTES,
    ("decode", "4096 -> 14336, batch 16", "scaledot int4 in groups of 128"): _FEW_BYTES,
    ("decode", "14336 -> 4096, batch 1", "scaledot int4 in groups of 128"): _FEW_BYTES,
    ("decode", "14336 -> 4096, batch 16", "scaledot int4 in groups of 128"): _FEW_BYTES,
}


def remark(suite: str, case: str, side: str, target: float | None, reached: float | None) -> str:
    """What to say of a row, "" where it met its target or has none."""
    if target is None or reached is None or reached >= target:
        return ""
    return " ".join(REMARKS.get((suite, case, side), "").split())
