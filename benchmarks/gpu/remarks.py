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
Integers are summed exactly, but every sum of 128 terms must be converted to float32, at half the rate at which it is
multiplied, while the tensor cores wait for registers. Tried and not kept: sums that start from the bits of 1.5 x 2^23,
which need no conversion, but as many moves and one more addition.
"""
_FEW_BYTES = """
A layer has so few bytes that starting a program and its last tiles weigh beside reading them, and a pass that adds the
parts of sums follows. Where there are 14336 columns, some multiprocessors have no work. Kept: one warpgroup that
fetches for the others, in few large copies. Tried and not kept: warpgroups that fetch for themselves, steps of 128
terms for each of them, and clusters that add parts of sums in shared memory, which do not all fit on the chip at once
and wait longer for each other's memory than the pass takes.
"""
_WORDS: tuple[tuple[str, str, tuple[str, ...], tuple[str, ...]], ...] = (  # words, suite, cases, sides
    (_POWER, "dense", ("A",), ("scaledot fp8_current", "scaledot fp8_delayed", "scaledot fp8_current, nn.Dense")),
    (_POWER, "dense", ("B",), ("scaledot fp8_current",)),
    (_HISTORY, "dense", ("small",), ("scaledot fp8_delayed",)),
    (_PROMOTED, "block", ("1x128 and 128x128",), ("scaledot",)),
    (_LINES, "block", ("B",), ("scaledot fp8_block",)),
    (_INTEGERS, "block", ("int8, 1x128 and 128x128", "int8, 1x128 and 1x128"), ("scaledot",)),
    (
        _FEW_BYTES,
        "decode",
        tuple(f"{layer}, batch {rows}" for layer in ("4096 -> 14336", "14336 -> 4096") for rows in (1, 16)),
        ("scaledot int4 in groups of 128",),
    ),
)
REMARKS = {(suite, case, side): words for words, suite, cases, sides in _WORDS for case in cases for side in sides}


def remark(suite: str, case: str, side: str, target: float | None, reached: float | None) -> str:
    """What to say of a row, "" where it met its target or has none."""
    if target is None or reached is None or reached >= target:
        return ""
    return " ".join(REMARKS.get((suite, case, side), "").split())
