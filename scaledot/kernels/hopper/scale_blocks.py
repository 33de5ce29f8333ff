"""Sizes of scale blocks and 8-bit float element types that the Mosaic kernels support; imports no Pallas."""

SCALE_BLOCK = 128  # elements that share a float32 scale: a 1×128 block, and each dimension of a 128×128 block
FLOAT8_ELEMENTS = ("float8_e4m3fn", "float8_e5m2")
# Block sizes of MXFP8 and NVFP4 by element and scale dtype: the length of 1-d blocks, and each side of square ones.
MICROSCALED_BLOCKS = {
    ("float8_e4m3fn", "float8_e8m0fnu"): 32,
    ("float8_e5m2", "float8_e8m0fnu"): 32,
    ("float4_e2m1fn", "float8_e4m3fn"): 16,
}
FOUR_BIT_BLOCK, ROTATION = 16, 128  # elements per scale, and per rotation, of casts with searched or corrected scales
FOUR_BIT_ELEMENTS = ("float4_e2m1fn", "int4")
