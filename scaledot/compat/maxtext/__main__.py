"""Runs a program of MaxText under a recipe, or under rules in JSON.

python -m scaledot.compat.maxtext fp8_current maxtext.trainers.pre_train.train base.yml run_name=...
python -m scaledot.compat.maxtext '{"*/gate": null, "*": "mxfp8"}' maxtext.trainers.pre_train.train base.yml ...
"""

import json
import sys

from scaledot.compat.launch import run_module
from scaledot.compat.maxtext.install import install

if __name__ == "__main__":
    rules, *program = sys.argv[1:] or [""]
    if not rules or rules.startswith("-"):
        program = []
    else:
        install(json.loads(rules) if rules.startswith("{") else rules)
    run_module(program, "python -m scaledot.compat.maxtext RECIPE-OR-JSON-RULES MODULE [ARGUMENT ...]")
