"""The rows of the code GPT: their names, phases and casts, and what compared rows differ in."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import pytest

from benchmarks.convergence.code_gpt import model, page, results, rows, training
from benchmarks.convergence.code_gpt.config import TINY, Config
from benchmarks.record import RESULTS
from scaledot.recipes import MXFP8, NVFP4, Gemm


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("bf16,nvfp4", ["bf16", "nvfp4"]),
        ("nvfp4, last block mxfp8,nvfp4", ["nvfp4, last block mxfp8", "nvfp4"]),
        ("nvfp4, nvfp4, 1x16 weights, bf16", ["nvfp4", "nvfp4, 1x16 weights", "bf16"]),
    ],
)
def test_rows_are_selected_by_names_that_may_contain_commas(text, names):
    assert [row.name for row in rows.selected(text)] == names


def test_an_unknown_row_is_refused_with_the_nearest_names():
    with pytest.raises(ValueError, match=r"`row` 'mxfp9' is not in ROWS; did you mean 'mxfp8'"):
        rows.selected("bf16,mxfp9")


def test_phases_have_a_recipe_for_each_block():
    config = Config(blocks=3, shared_steps=300)
    assert rows.Row("a").phases(config) == [(1500, (None, None, None))]
    assert rows.Row("a", "nvfp4", last="mxfp8").phases(config) == [(1500, (NVFP4, NVFP4, MXFP8))]
    switched = rows.Row("a", "nvfp4", last="mxfp8", switch=(0.8, None))
    assert switched.phases(config) == [(1200, (NVFP4, NVFP4, MXFP8)), (1500, (None,) * 3)]
    early, late = (dataclasses.replace(switched, switch=(f, "bf16")) for f in (0.2, 0.89))
    assert early.phases(config) == [(1500, (None,) * 3)]
    short = Config(blocks=3, steps=100, shared_steps=0, warmup=1)
    assert late.phases(short) == [(100, (NVFP4, NVFP4, MXFP8))]  # its end is that of the last chunk
    with pytest.raises(ValueError, match=r"between 0 and 0.9, .* not 0.95"):
        rows.Row("a", "nvfp4", switch=(0.95, "bf16"))


def test_a_hash_of_casts_changes_with_a_cast_and_not_with_a_name():
    renamed = dataclasses.replace(NVFP4, name="other")
    changed = dataclasses.replace(NVFP4, wgrad=Gemm())
    digests = [rows.Row("a", recipe).digest(TINY) for recipe in (NVFP4, renamed, changed)]
    assert digests[0] == digests[1] != digests[2]


def test_names_of_rows_are_unique_and_their_runs_differ():
    assert len({row.name for row in rows.ROWS}) == len({row.digest(Config()) for row in rows.ROWS}) == len(rows.ROWS)


FORWARD, BACKWARD = ("fwd.x", "fwd.w"), ("dgrad.g", "dgrad.w", "wgrad.x", "wgrad.g")
X, W, G = ("fwd.x", "wgrad.x"), ("fwd.w", "dgrad.w"), ("dgrad.g", "wgrad.g")
SEARCH = dict.fromkeys(("search", "scale_max"), FORWARD)
EDEN = dict.fromkeys(("rounding", "rotation", "target", "scale_max"), BACKWARD)
PLUS = {**EDEN, "scale_max": FORWARD + BACKWARD, "search": FORWARD, "block": W, "subtract_mean": X}
GRIDS = {"element": FORWARD + BACKWARD, "target": BACKWARD, "grids": FORWARD + BACKWARD}
CHANGES: dict[tuple[str, str], dict[str, tuple[str, ...]]] = {  # what differs, field by field, and in which operands
    ("nvfp4", "nvfp4, forward only"): {"cast": BACKWARD},
    ("nvfp4", "nvfp4, backward only"): {"cast": FORWARD},
    ("nvfp4", "nvfp4, 1x16 weights"): {"block": W},
    ("nvfp4, 1x16 weights", "nvfp4, 1x16 weights, searched forward"): SEARCH,
    ("nvfp4, 1x16 weights", "nvfp4, 1x16 weights, nvint4 grid"): {"element": FORWARD + BACKWARD},
    ("nvfp4, 1x16 weights", "nvfp4, 1x16 weights, if4 grid"): dict.fromkeys(("element", "grids"), FORWARD + BACKWARD),
    ("nvfp4", "nvfp4, 1x16 weights, if4 grid"): {
        **dict.fromkeys(("element", "grids"), FORWARD + BACKWARD),
        "block": W,
    },
    ("nvfp4", "ufp4"): {"element": FORWARD + BACKWARD, "rotation": (*FORWARD, *BACKWARD[:2]), "block": W},
    ("nvfp4", "nvfp4, MS-EDEN backward"): {**EDEN, "block": ("dgrad.w",)},
    ("nvfp4", "nvfp4_four_over_six"): {"search": (*FORWARD, "dgrad.w")},
    ("nvfp4", "averis"): {"subtract_mean": X + G},
    ("nvfp4", "nvfp4, last block mxfp8"): {},
    ("nvfp4", "nvfp4, bf16 from 80 %"): {},
    ("nvfp4, last block mxfp8", "nvfp4_plus, last block mxfp8"): PLUS,
    ("nvfp4, bf16 from 80 %", "nvfp4_plus, bf16 from 80 %"): PLUS,
    ("nvfp4, 1x16 weights, searched forward", "nvfp4_plus, no mean"): EDEN,
    ("nvfp4_plus, no mean", "nvfp4_plus"): {"subtract_mean": X},
    ("nvfp4_plus, no mean", "nvfp4_plus, means of x and g"): {"subtract_mean": X + G},
    ("nvfp4_plus, no mean", "nvfp4_plus, no mean, requantised"): {"requantized": ("dgrad.w", "wgrad.x")},
    ("nvfp4_plus, no mean", "nvfp4_plus, no mean, forward only"): {"cast": BACKWARD},
    ("nvfp4_plus, no mean", "nvfp4_plus, no mean, backward only"): {"cast": FORWARD},
    ("nvfp4_plus, no mean", "nvfp4_plus, no mean, last block mxfp8"): {},
    ("nvfp4_plus", "nvfp4_plus, no search forward"): SEARCH,
    ("nvfp4_plus", "nvfp4_plus, searched backward"): dict.fromkeys(("search", "target"), BACKWARD),
    ("nvfp4_plus", "nvfp4_plus, forward only"): {"cast": BACKWARD},
    ("nvfp4_plus", "nvfp4_plus, only x of fwd"): {"cast": ("fwd.w", *BACKWARD)},
    ("nvfp4_plus", "nvfp4_plus, only w of fwd"): {"cast": ("fwd.x", *BACKWARD)},
    ("nvfp4_plus", "nvfp4_plus, last block mxfp8"): {},
    ("nvfp4_plus", "nvfp4_plus, bf16 from 80 %"): {},
    ("nvfp4_plus", "nvint4_plus"): {"element": FORWARD + BACKWARD, "target": BACKWARD},
    ("nvint4_plus", "nvint4_plus, rotated forward"): {"rotation": FORWARD},
    ("nvfp4_plus", "if4"): GRIDS,
    ("nvfp4_plus, no mean", "if4, no mean"): GRIDS,
    ("if4, no mean", "if4"): {"subtract_mean": X},
    ("if4", "if4, last block mxfp8"): {},
}


def fields_of(row: rows.Row) -> dict[str, dict[str, object]]:
    """The fields of the casts of the first block, with those of their formats, by operand."""

    def fields(cast):
        own = {field.name: getattr(cast, field.name) for field in dataclasses.fields(cast)}
        return {**own, **{field.name: getattr(cast.format, field.name) for field in dataclasses.fields(cast.format)}}

    casts = row.phases(Config())[0][1][0].casts()
    return {f"{matmul}.{tensor}": fields(cast) | {"block": cast.block_2d} for matmul, tensor, cast in casts}


@pytest.mark.parametrize(("name", "changed"), [comparison[:2] for comparison in page.COMPARISONS])
def test_compared_rows_differ_in_what_the_page_says(name, changed):
    by_name = {row.name: row for row in rows.ROWS}
    casts, others = fields_of(by_name[name]), fields_of(by_name[changed])
    differing: dict[str, set[str]] = {}
    for operand in casts.keys() | others.keys():
        if operand not in casts or operand not in others:
            differing.setdefault("cast", set()).add(operand)
            continue
        for field in casts[operand].keys() - {"format", "name"}:
            if casts[operand][field] != others[operand][field]:
                differing.setdefault(field, set()).add(operand)
    assert differing == {field: set(operands) for field, operands in CHANGES[name, changed].items()}


@pytest.mark.parametrize(("row", "last"), [(row.name, row.last) for row in rows.ROWS if row.last])
def test_rows_named_for_their_last_block_train_it_under_that_recipe(row, last):
    (chosen,) = rows.selected(row)
    *others, final = chosen.phases(Config())[0][1]
    assert (final, last in row) == (MXFP8, True)
    assert MXFP8 not in others


TRAINED = {run["row"] for run in results.Results(RESULTS / page.FILE).runs()}
EVERY_ROW = [  # rows with results can be trained, up to later changes
    pytest.param(row, id=row.name, marks=pytest.mark.exhaustive if row.name in TRAINED else ()) for row in rows.ROWS
]


@pytest.mark.usefixtures("standard_promotion")  # optax mixes dtypes
@pytest.mark.parametrize("row", EVERY_ROW)
def test_the_gradient_of_every_row_traces(row):
    config = dataclasses.replace(TINY, blocks=1)
    for _, recipes in row.phases(config):
        loss = functools.partial(model.loss, recipes=recipes, config=config)
        params, _ = training.abstract_state(config)
        windows = jax.ShapeDtypeStruct((config.batch, config.tokens + 1), jnp.uint8)
        jax.eval_shape(jax.grad(loss), params, windows, jax.random.key(0))
