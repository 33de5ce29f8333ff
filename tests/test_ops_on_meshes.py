"""Verbs on arrays that are split over CPU devices: results of one device, which lie as those of plain arrays."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from meshes import reordered

import scaledot as sd
from scaledot import sharding

pytestmark = pytest.mark.jax_versions

KINDS = [AxisType.Explicit, AxisType.Auto]
FAMILIES = {  # format, and options for x (rows, k) and w (k, columns)
    "channels": ("int8", {"axis": 1}, {"axis": 0}),
    "zero points": ("int4", {"axis": 1, "block": 32, "calibration": "minmax"}, {"axis": 0, "block": 32}),
    "integer tiles": ("int8", {"axis": 1, "block": 128}, {"axis": 0, "block": 128}),
    "tensors": ("fp8_e4m3", {"block": (0, 0)}, {"block": (0, 0)}),
    "squares": ("fp8_e4m3", {"block": (1, 128)}, {"block": (128, 128)}),
    "powers of two": ("mxfp8", {"axis": 1}, {"axis": 0}),
    "two levels": ("nvfp4", {"axis": 1}, {"axis": 0}),
    "codebook": ("nf4", {"axis": 1}, {"axis": 0}),
}
FORMATS = ["fp8_e4m3", pytest.param("int8", marks=pytest.mark.exhaustive)]  # where families differ little
LAYOUTS = {"column": (P("dp"), P(None, "tp"), P("dp", "tp")), "row": (P("dp", "tp"), P("tp"), P("dp"))}


def mesh_of(kind: AxisType):
    return jax.make_mesh((2, 2), ("dp", "tp"), axis_types=(kind,) * 2, devices=jax.devices()[:4])


@functools.cache
def normal(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def run_on(mesh, verb, arrays, specs):
    """A jitted verb on arrays that are split."""
    with jax.set_mesh(mesh):
        return jax.jit(verb)(*(sharding.shard(a, spec, mesh=mesh) for a, spec in zip(arrays, specs, strict=True)))


def require_close(found, expected, verb, arrays, terms: int):
    """Within what two orders of the same float32 sums may differ by; see meshes.reordered."""
    magnitudes = (jnp.abs(sd.dequantize(a) if isinstance(a, sd.ScaledArray) else a) for a in arrays)
    total = np.asarray(verb(*magnitudes))
    assert (np.abs(np.asarray(found) - np.asarray(expected)) <= reordered(total, terms)).all()


def require_lies(found, mesh, spec):
    assert found.sharding.is_equivalent_to(NamedSharding(mesh, spec), found.ndim), found.sharding


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("family", FAMILIES)
def test_dots_of_split_arrays_are_those_of_one_device(family, layout, kind):
    format, x_how, w_how = FAMILIES[family]
    x, w = normal(0, 64, 256), normal(1, 256, 256)
    q, p = sd.quantize(x, format, **x_how), sd.quantize(w, format, **w_how)
    x_spec, w_spec, y_spec = LAYOUTS[layout]
    mesh = mesh_of(kind)
    wanted = {"out_sharding": y_spec} if kind == AxisType.Explicit else {}
    for left in (q, x):
        found = run_on(mesh, functools.partial(sd.matmul, **wanted), (left, p), (x_spec, w_spec))
        require_close(found, sd.matmul(left, p), jnp.matmul, (left, p), 256)
        require_lies(found, mesh, y_spec)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
@pytest.mark.parametrize("family", FAMILIES)
def test_casts_of_split_arrays_are_those_of_one_device(family, kind):
    format, _, how = FAMILIES[family]
    w, mesh = normal(1, 256, 256), mesh_of(kind)

    def there_and_back(w):
        q = sd.quantize(w, format, **how)
        return q, sd.dequantize(q), sd.requantize(q, "mxfp8"), q.T

    found, expected = run_on(mesh, there_and_back, (w,), (P("dp", "tp"),)), there_and_back(w)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()
    q, values, again, turned = found
    for a, spec in ((q, P("dp", "tp")), (values, P("dp", "tp")), (again, P("dp", "tp")), (turned, P("tp", "dp"))):
        require_lies(a.data if isinstance(a, sd.ScaledArray) else a, mesh, spec)


def test_a_split_that_cuts_blocks_is_told_what_would_fit():
    mesh = jax.make_mesh((4,), ("tp",), axis_types=(AxisType.Explicit,), devices=jax.devices()[:4])
    x = jax.device_put(jnp.ones((2, 192)), NamedSharding(mesh, P(None, "tp")))
    message = r"axis 1 of 192 elements is sharded over 'tp' into 4 shards of 48.*; shard it over 3 devices, pad it to"
    with jax.set_mesh(mesh), pytest.raises(ValueError, match=message):
        sd.quantize(x, "mxfp8")


def _batched(sub: str):
    return functools.partial(sd.einsum, sub), functools.partial(jnp.einsum, sub)


def _mapped(**how):
    return tuple(lambda x, w, m=matmul: jax.vmap(lambda x: m(x, w), **how)(x) for matmul in (sd.matmul, jnp.matmul))


X, BOTH, W = (4, 64, 256), (4, 256, 256), (256, 256)
ROWS, TILE = {"axis": 2, "block": 128}, {"axis": 1, "block": 128}
BATCHED = {  # verb and the same of plain arrays, shapes, options of casts, specs and how the result lies
    "einsum, columns": (_batched("bsk,kn->bsn"), X, W, None, {"axis": 0}, P("dp"), P(None, "tp"), P("dp", None, "tp")),
    "einsum, rows": (_batched("bsk,kn->bsn"), X, W, None, {"axis": 0}, P("dp", None, "tp"), P("tp"), P("dp")),
    "einsum, batch": (_batched("bsk,bkn->bsn"), X, BOTH, ROWS, TILE, P("dp"), P("dp", None, "tp"), P("dp", None, "tp")),
    "vmap": (
        (jax.vmap(sd.matmul), jax.vmap(jnp.matmul)),
        X,
        BOTH,
        ROWS,
        TILE,
        P("dp"),
        P("dp", None, "tp"),
        P("dp", None, "tp"),
    ),
    "vmap of x": (_mapped(), X, W, None, {"axis": 0}, P("dp"), P(None, "tp"), P("dp", None, "tp")),
    "vmap along a mesh axis": (
        _mapped(spmd_axis_name="dp"),
        X,
        W,
        None,
        {"axis": 0},
        P("dp"),
        P(None, "tp"),
        P("dp", None, "tp"),
    ),
}


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("case", BATCHED)
def test_batched_products_of_split_arrays_are_those_of_one_device(case, format, kind):
    (verb, plain), x_shape, w_shape, x_how, w_how, x_spec, w_spec, y_spec = BATCHED[case]
    x, w = normal(0, *x_shape), sd.quantize(normal(1, *w_shape), format, **w_how)
    x = x if x_how is None else sd.quantize(x, format, **x_how)
    mesh = mesh_of(kind)
    wanted = {"out_sharding": y_spec} if kind == AxisType.Explicit and case.startswith("einsum") else {}
    found = run_on(mesh, functools.partial(verb, **wanted), (x, w), (x_spec, w_spec))
    require_close(found, verb(x, w), plain, (x, w), 256)
    require_lies(found, mesh, y_spec)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
@pytest.mark.parametrize("format", FORMATS)
def test_casts_under_vmap_lie_as_their_arrays(format, kind):
    x, mesh = normal(0, *X), mesh_of(kind)

    def cast(x):
        q = jax.vmap(functools.partial(sd.quantize, format=format, block=128))(x)
        return q, jax.vmap(sd.dequantize)(q)

    (q, values), expected = run_on(mesh, cast, (x,), (P("dp", None, "tp"),)), cast(x)
    for a, b in zip(jax.tree.leaves((q, values)), jax.tree.leaves(expected), strict=True):
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()
    for a in (q.data, q.scale, values):
        require_lies(a, mesh, P("dp", None, "tp"))


SIZES = np.array([10, 0, 30, 20])
GROUPED = {
    "columns": (P(), P(None, None, "tp"), P(None, "tp")),
    "rows": (P(None, "tp"), P(None, "tp"), P()),
    "groups": (P("dp"), P("dp"), P("dp")),
}


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("layout", GROUPED)
def test_grouped_products_of_split_arrays_are_those_of_one_device(layout, format, kind):
    x, w = normal(0, 64, 256), sd.quantize(normal(1, 4, 256, 256), format, **TILE)
    mesh, (x_spec, w_spec, y_spec) = mesh_of(kind), GROUPED[layout]
    wanted = {"out_sharding": y_spec} if kind == AxisType.Explicit else {}
    verb = functools.partial(sd.ragged_dot, **wanted)
    found = run_on(mesh, verb, (x, w, SIZES), (x_spec, w_spec, P()))
    plain = functools.partial(jax.lax.ragged_dot, group_sizes=jnp.asarray(SIZES))
    require_close(found, sd.ragged_dot(x, w, SIZES), plain, (x, w), 256)
    if kind == AxisType.Explicit:
        require_lies(found, mesh, y_spec)
    else:  # left to XLA
        values = jnp.asarray(sd.dequantize(w))
        of_plain = run_on(mesh, jax.lax.ragged_dot, (x, values, SIZES), (x_spec, w_spec, P()))
        require_lies(found, mesh, of_plain.sharding.spec)


def test_grouped_products_along_explicit_axes_ask_how_results_lie():
    mesh = mesh_of(AxisType.Explicit)
    arrays = normal(0, 64, 256), sd.quantize(normal(1, 4, 256, 256), "int8"), SIZES
    with pytest.raises(ValueError, match="pass `out_sharding`, the sharding of the result"):
        run_on(mesh, sd.ragged_dot, arrays, (P(), P(None, None, "tp"), P()))


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("layout", ["column", "row"])
def test_convolutions_of_split_arrays_are_those_of_one_device(layout, format, kind):
    x = sd.quantize(normal(0, 8, 6, 5, 64), format, axis=(1, 2, 3), block=(0, 0, 0))
    w = sd.quantize(normal(1, 3, 3, 64, 32), format, axis=(0, 1, 2), block=(0, 0, 0))
    x_spec, w_spec, y_spec = {
        "column": (P("dp"), P(None, None, None, "tp"), P("dp", None, None, "tp")),
        "row": (P("dp", None, None, "tp"), P(None, None, "tp"), P("dp")),
    }[layout]
    window = {"window_strides": (1, 1), "padding": "SAME", "dimension_numbers": ("NHWC", "HWIO", "NHWC")}
    mesh = mesh_of(kind)
    wanted = {"out_sharding": y_spec} if kind == AxisType.Explicit else {}
    found = run_on(mesh, functools.partial(sd.conv_general_dilated, **window, **wanted), (x, w), (x_spec, w_spec))
    plain = functools.partial(jax.lax.conv_general_dilated, **window)
    require_close(found, sd.conv_general_dilated(x, w, **window), plain, (x, w), 9 * 64)
    require_lies(found, mesh, y_spec)
