"""`scaledot explain`: prints which kernels run a matmul or a training step, from shapes alone, without computing it.

With `--recipe`, it explains the casts and the three matmuls of `train.dense`; with `--formats`, the casts of both
operands and one `matmul`.
"""

import argparse
from collections.abc import Sequence
from typing import Any

from scaledot.cli.arguments import add_json, sizes
from scaledot.cli.output import show

EXAMPLES = (
    "scaledot explain 8192x4096 4096x14336 --recipe fp8_current",
    "scaledot explain 4x2048x4096 4096x4096 --recipe mxfp8 --json",
    "scaledot explain 8x4096 4096x14336 --formats bfloat16 int4 --block 128",
    "scaledot explain 512x4096 4096x4096 --formats fp8_e4m3 fp8_e4m3 --block 1x128 128x128",
)
DTYPES = ("bfloat16", "float16", "float32")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("x", type=sizes, metavar="X", help="shape of x, (..., k), such as 8192x4096")
    parser.add_argument("w", type=sizes, metavar="W", help="shape of w, (k, n), such as 4096x14336")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--recipe", help="explain a training step: fwd, dgrad, wgrad and their casts")
    source.add_argument(
        "--formats", nargs=2, metavar=("X", "W"), help=f"explain one matmul of these formats or {', '.join(DTYPES)}"
    )
    parser.add_argument(
        "--block",
        nargs="+",
        type=sizes,
        metavar="BLOCK",
        help="with --formats: elements that share a scale, along k (128), or along the free dim and k (128x128); one "
        "block for both operands, or one for each (default: the formats' blocks)",
    )
    parser.add_argument(
        "--dtype",
        choices=DTYPES,
        default="bfloat16",
        help="dtype of x before its cast, and of the result (default bfloat16)",
    )
    parser.add_argument(
        "--weight-dtype", choices=DTYPES, default="float32", help="dtype of w before its cast (default float32)"
    )
    add_json(parser)


def run(options: argparse.Namespace) -> int:
    from scaledot.kernels import table
    from scaledot.recipes.casts import GEMM_OPERANDS

    problems = _step_problems(options) if options.recipe else _matmul_problems(options)
    rows = [(role, str(problem), table.verdicts(problem)) for role, problem in problems]
    sections = (
        f"{role}: {table.explain(problem)}" if role in GEMM_OPERANDS else table.explain(problem)
        for role, problem in problems
    )
    show(options, "\n\n".join([_heading(options), *sections]), _record(options, rows))
    return 0


def _record(options: argparse.Namespace, rows: Sequence[tuple[str, str, Sequence[Any]]]) -> dict[str, Any]:
    records = [
        {
            "role": role,
            "problem": problem,
            "selected": next(row.kernel for row in verdicts if row.verdict == "selected"),
            "kernels": [row._asdict() for row in verdicts],
        }
        for role, problem, verdicts in rows
    ]
    arguments = {
        name: getattr(options, name) for name in ("x", "w", "recipe", "formats", "block", "dtype", "weight_dtype")
    }
    return arguments | _environment() | {"problems": records}


def _heading(options: argparse.Namespace) -> str:
    precision = options.recipe or " x ".join(options.formats)
    shapes = f"x[{','.join(map(str, options.x))}] w[{','.join(map(str, options.w))}]"
    return "{precision}, {shapes}, on {device} with jax {jax}".format(
        precision=precision, shapes=shapes, **_environment()
    )


def _environment() -> dict[str, str]:
    """Returns the device and jax version of this process, which kernels are chosen for."""
    import jax

    return {"device": jax.devices()[0].device_kind, "jax": jax.__version__}


def _step_problems(options: argparse.Namespace) -> list[tuple[str, Any]]:
    """Returns the casts and matmuls of a training step, each with its role."""
    import jax

    from scaledot import train
    from scaledot.kernels.spec import Problem
    from scaledot.ops.explain import problems
    from scaledot.recipes import find_recipe
    from scaledot.state import init_state

    recipe = find_recipe(options.recipe)
    if options.block:
        raise ValueError("`--block` is for `--formats`; the blocks of `--recipe` are part of the recipe")
    x = jax.ShapeDtypeStruct(options.x, options.dtype)
    w = jax.ShapeDtypeStruct(options.w, options.weight_dtype)
    state = {"state": jax.eval_shape(lambda: init_state(recipe))} if recipe.delayed else {}
    found = problems(train.dense, x, w, recipe=recipe, **state)
    matmuls = [problem for problem in found if isinstance(problem, Problem)]
    fwd = matmuls[0].contraction
    roles = {fwd.wgrad: "wgrad", fwd.dgrad: "dgrad", fwd: "fwd"}
    return [(roles[one.contraction] if isinstance(one, Problem) else "cast", one) for one in found]


def _matmul_problems(options: argparse.Namespace) -> list[tuple[str, Any]]:
    """Returns the casts of the operands that are quantised, and their matmul."""
    import scaledot as sd
    from scaledot.ops.explain import problems

    if len(options.w) != 2:
        raise ValueError(f"`W` must be (k, n), such as 4096x14336, not {'x'.join(map(str, options.w))}")
    (x_name, w_name), (x_block, w_block) = options.formats, _blocks(options.block)
    x, x_casts = _operand(options.x, options.dtype, x_name, {"block": x_block})
    w, w_casts = _operand(options.w, options.weight_dtype, w_name, _weight_block(w_block))
    matmuls = problems(sd.matmul, x, w, preferred_element_type=options.dtype)
    return [*(("cast", cast) for cast in (*x_casts, *w_casts)), *(("matmul", matmul) for matmul in matmuls)]


def _operand(shape: tuple[int, ...], dtype: str, name: str, layout: dict[str, Any]) -> tuple[Any, list[Any]]:
    """Returns an abstract operand of that format or dtype, and the casts that compute it."""
    import jax

    import scaledot as sd
    from scaledot.ops.explain import problems

    if name in DTYPES:
        return jax.ShapeDtypeStruct(shape, name), []
    array = jax.ShapeDtypeStruct(shape, dtype)
    casts = problems(sd.quantize, array, name, **layout)
    return jax.eval_shape(lambda array: sd.quantize(array, name, **layout), array), casts


def _weight_block(block: tuple[int, ...] | None) -> dict[str, Any]:
    """Returns the arguments of `quantize` for w (k, n) with a block along k, or along n and k."""
    if block is None or len(block) == 1:
        return {"axis": 0, "block": block}
    return {"axis": -1, "block": block[::-1]}


def _blocks(blocks: Sequence[tuple[int, ...]] | None) -> Sequence[tuple[int, ...] | None]:
    """Returns one block for each operand."""
    if not blocks:
        return (None, None)
    if len(blocks) > 2:
        raise ValueError(f"`--block` takes one block for both operands or one for each, not {len(blocks)}")
    return (blocks[0], blocks[-1])
