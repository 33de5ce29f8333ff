"""The swizzle atom of SMEM operand tiles, and the K step of the matmuls, which is one atom wide; imports no Pallas.

With the 128-byte swizzle, TMA and WGMMA address SMEM in atoms of 8 rows × 128 bytes. Arrays are padded to whole atoms
along tiled dims. A K step of 128 bytes is 128 elements of 8-bit operands, and 64 of bfloat16.
"""

ATOM_ROWS = 8
ATOM_BYTES = 128
K_STEP_BYTES = ATOM_BYTES  # along K, of a K-major operand tile in one pipeline stage
K_STEP = K_STEP_BYTES  # elements along K of a step of 8-bit operands; groups along K start at multiples of it
