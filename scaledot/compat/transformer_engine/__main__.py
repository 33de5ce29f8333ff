"""Runs a program in which `import transformer_engine` imports scaledot's modules.

For example `python -m scaledot.compat.transformer_engine maxtext.trainers.pre_train.train base.yml
quantization=te_mxfp8`.
"""

import sys

from scaledot.compat.launch import run_module
from scaledot.compat.transformer_engine.install import install

if __name__ == "__main__":
    install()
    run_module(sys.argv[1:], "python -m scaledot.compat.transformer_engine MODULE [ARGUMENT ...]")
