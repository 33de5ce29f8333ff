"""`parametrize` tables of formats and recipes.

They are derived from FORMATS and RECIPES, so that new rows are tested without further changes. Rows listed as
EXHAUSTIVE_ONLY share every code path with other rows and run under `pytest --all` only.
"""

import pytest

import scaledot as sd
from scaledot.recipes import RECIPES

# Other integer widths differ from int8 and int4 in a constant, E5M2 and MXFP6 from E4M3 and MXFP8 in the element type,
# whose codes test_encode tests exhaustively; MXFP4 has the scales of MXFP8 and the elements of NVFP4, and
# nvint4 has the scales of NVFP4 and the elements of int4.
EXHAUSTIVE_ONLY_FORMATS = (
    "int7",
    "int6",
    "int5",
    "int3",
    "int2",
    "fp8_e5m2",
    "mxfp8_e5m2",
    "mxfp6_e2m3",
    "mxfp6_e3m2",
    "mxfp4",
    "nvint4",
)
EXHAUSTIVE_ONLY_RECIPES = (
    "nvfp4_four_over_six",
    "nvfp4_plus",
    "quartet_ii",
    "averis",
    "ufp4",
    "if4",
    "int8_block",
    "int8_qat",
    "fp8_qat",
    "w8a16_qat",
    "w4a8_qat",
)


def params_of(values, exhaustive_only, name=lambda value: value):
    """Returns one `pytest.param` per value; those whose name is in `exhaustive_only` are marked `exhaustive`."""
    return [
        pytest.param(v, marks=[pytest.mark.exhaustive] if name(v) in exhaustive_only else [], id=str(name(v)))
        for v in values
    ]


def fp4_optimized(table):
    """A table whose FP4 rows are marked `optimized`: legacy CPU emitters (`--compilation cheap`) cannot bitcast FP4."""
    return [
        pytest.param(*row.values, id=row.id, marks=[*row.marks, pytest.mark.optimized] if _is_fp4(row) else row.marks)
        for row in table
    ]


def _is_fp4(row) -> bool:
    recipes = [RECIPES[value] for value in row.values if isinstance(value, str) and value in RECIPES]
    has_fp4_cast = any("float4" in cast.format.element for recipe in recipes for _, _, cast in recipe.casts())
    return has_fp4_cast or "fp4" in (row.id or str(row.values)).lower()


EACH_FORMAT = params_of(sd.FORMATS, EXHAUSTIVE_ONLY_FORMATS)
EACH_RECIPE = params_of(RECIPES, EXHAUSTIVE_ONLY_RECIPES)
STATELESS = [name for name in RECIPES if not RECIPES[name].delayed]
STATELESS_RECIPES = params_of(STATELESS, EXHAUSTIVE_ONLY_RECIPES)
