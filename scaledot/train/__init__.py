"""Training: products that are quantised forward and backward, as a Recipe says.

`dot_general`, `einsum` and `dense`; `ragged_dot` for rows in groups; `conv_general_dilated`. All of them are one
custom_vjp (`product`) over a kind of layout.
"""

from scaledot.train.convolutions import conv_general_dilated
from scaledot.train.dots import dense, dot_general, einsum
from scaledot.train.groups import ragged_dot
from scaledot.train.splits import Specs, SpecsByPath

__all__ = ["Specs", "SpecsByPath", "conv_general_dilated", "dense", "dot_general", "einsum", "ragged_dot"]
