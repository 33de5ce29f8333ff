"""Recipes in MaxText, which stays unmodified: no fork, and no `quantization=` in its configuration.

    from scaledot.compat import maxtext
    maxtext.install("mxfp8")                                  # before MaxText builds its model

    from absl import app
    from maxtext.trainers.pre_train import train
    app.run(train.main)                                       # with MaxText's own arguments

or, from the command line: `python -m scaledot.compat.maxtext mxfp8 maxtext.trainers.pre_train.train base.yml ...`.
Instead of a recipe, rules by path: `{"*/gate": None, "*": "mxfp8"}` leaves the routers of experts unquantised. The
recipe of each layer is logged when the model is built. Layers are named by their paths in the model:
`decoder/layers/mlp/wi_0` if layers are scanned, `decoder/layers_3/self_attention/query` if not, and
`.../MoeBlock_0/wi_0`, `wi_1`, `wo` and `gate` in mixture-of-experts layers. As in MaxText's own quantisation, the
logits and attention stay unquantised.
"""

from scaledot.compat.maxtext.install import install, uninstall

__all__ = ["install", "uninstall"]
