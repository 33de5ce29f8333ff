"""Sizes and elements that the Mosaic kernels share, without loading them."""

LINE = 128  # elements of a line with a float32 scale
FLOAT8_ELEMENTS = ("float8_e4m3fn", "float8_e5m2")
# By element and scale: the length of a 1-d block, and of each side of a square one, of MXFP8 and NVFP4.
BLOCKS = {
    ("float8_e4m3fn", "float8_e8m0fnu"): 32,
    ("float8_e5m2", "float8_e8m0fnu"): 32,
    ("float4_e2m1fn", "float8_e4m3fn"): 16,
}
