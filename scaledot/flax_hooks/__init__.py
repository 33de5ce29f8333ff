"""Layers of Flax that multiply by a kernel, and the hooks through which their matmuls are replaced.

Recipes (`scaledot.linen`, `scaledot.nnx`) and quantised kernels (`scaledot.inference`) use the same hooks. Nothing in
Flax or JAX is patched.
"""


class MatmulUnderRecipe:
    """Base class of this library's matmul modules, which quantised kernels replace; other matmuls are the user's."""
