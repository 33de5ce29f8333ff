"""How contractions are computed: frozen problems, and an ordered table of kernels that can solve them."""
