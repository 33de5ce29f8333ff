"""Functions on sharded arrays: results match a single device and are sharded as those of plain arrays."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from meshes import summation_order_bound

import scaledot as sd
from scaledot import sharding

pytestmark = pytest.mark.jax_versions

KINDS = [AxisType.Explicit, AxisType.Auto]
FAMILIES = {  # format, and options for x (rows, k) and w (k, columns)
    "per channel": ("int8", {"axis": 1}, {"axis": 0}),
    "zero points": ("int4", {"axis": 1, "block": 32, "calibration": "minmax"}, {"axis": 0, "block": 32}),
    "integer tiles": ("int8", {"axis": 1, "block": 128}, {"axis": 0, "block": 128}),
    "per tensor": ("fp8_e4m3", {"block": (0, 0)}, {"block": (0, 0)}),
    "1x128 and 128x128": ("fp8_e4m3", {"block": (1, 128)}, {"block": (128, 128)}),
    "powers of two": ("mxfp8", {"axis": 1}, {"axis": 0}),
    "two levels": ("nvfp4", {"axis": 1}, {"axis": 0}),
    "codebook": ("nf4", {"axis": 1}, {"axis": 0}),
}
FORMATS = [
    "fp8_e4m3",
    pytest.param("int8", marks=pytest.mark.exhaustive),
]  # for tests in which all FAMILIES run the same code
LAYOUTS = {"column": (P("dp"), P(None, "tp"), P("dp", "tp")), "row": (P("dp", "tp"), P("tp"), P("dp"))}


def mesh_of(kind: AxisType):
    return jax.make_mesh((2, 2), ("dp", "tp"), axis_types=(kind,) * 2, devices=jax.devices()[:4])


@functools.cache
def normal(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def run_on(mesh, function, arrays, specs):
    """Runs a jitted function on sharded arrays."""
    with jax.set_mesh(mesh):
        return jax.jit(function)(*(sharding.shard(a, spec, mesh=mesh) for a, spec in zip(arrays, specs, strict=True)))


def require_close(found, expected, function, arrays, k: int):
    """Asserts that results differ by the order of accumulation over K elements only (meshes.summation_order_bound)."""
    magnitudes = (jnp.abs(sd.dequantize(a) if isinstance(a, sd.ScaledArray) else a) for a in arrays)
    allowed = summation_order_bound(function(*magnitudes), k, expected)
    assert (np.abs(np.asarray(found) - np.asarray(expected)) <= allowed).all()


def require_sharding(found, mesh, spec):
    assert found.sharding.is_equivalent_to(NamedSharding(mesh, spec), found.ndim), found.sharding


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("family", FAMILIES)
def test_dots_of_sharded_arrays_match_a_single_device(family, layout, kind):
    format, x_cast, w_cast = FAMILIES[family]
    x, w = normal(0, 64, 256), normal(1, 256, 256)
    q, p = sd.quantize(x, format, **x_cast), sd.quantize(w, format, **w_cast)
    x_spec, w_spec, y_spec = LAYOUTS[layout]
    mesh = mesh_of(kind)
    options = {"out_sharding": y_spec} if kind == AxisType.Explicit else {}
    for left in (q, x):
        found = run_on(mesh, functools.partial(sd.matmul, **options), (left, p), (x_spec, w_spec))
        require_close(found, sd.matmul(left, p), jnp.matmul, (left, p), 256)
        require_sharding(found, mesh, y_spec)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
@pytest.mark.parametrize("family", FAMILIES)
def test_casts_of_sharded_arrays_match_a_single_device(family, kind):
    format, _, options = FAMILIES[family]
    w, mesh = normal(1, 256, 256), mesh_of(kind)

    def round_trip(w):
        q = sd.quantize(w, format, **options)
        return q, sd.dequantize(q), sd.requantize(q, "mxfp8"), q.T

    found, expected = run_on(mesh, round_trip, (w,), (P("dp", "tp"),)), round_trip(w)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()
    q, values, again, transposed = found
    for a, spec in ((q, P("dp", "tp")), (values, P("dp", "tp")), (again, P("dp", "tp")), (transposed, P("tp", "dp"))):
        require_sharding(a.data if isinstance(a, sd.ScaledArray) else a, mesh, spec)


def test_a_sharding_that_cuts_blocks_raises_an_error_that_says_what_would_fit():
    mesh = jax.make_mesh((4,), ("tp",), axis_types=(AxisType.Explicit,), devices=jax.devices()[:4])
    x = jax.device_put(jnp.ones((2, 192)), NamedSharding(mesh, P(None, "tp")))
    message = r"axis 1 of 192 elements is sharded over 'tp' into 4 shards of 48.*; shard it over 3 devices, pad it to"
    with jax.set_mesh(mesh), pytest.raises(ValueError, match=message):
        sd.quantize(x, "mxfp8")


def _einsum(subscripts: str):
    return functools.partial(sd.einsum, subscripts), functools.partial(jnp.einsum, subscripts)


def _mapped(**options):
    return tuple(lambda x, w, m=matmul: jax.vmap(lambda x: m(x, w), **options)(x) for matmul in (sd.matmul, jnp.matmul))


X, W_BATCHED, W = (4, 64, 256), (4, 256, 256), (256, 256)
X_CAST, W_CAST = {"axis": 2, "block": 128}, {"axis": 1, "block": 128}
BATCHED = {  # function and that of plain arrays, shapes, cast options and specs of x and w, sharding of the result
    "einsum, columns": (_einsum("bsk,kn->bsn"), X, W, None, {"axis": 0}, P("dp"), P(None, "tp"), P("dp", None, "tp")),
    "einsum, rows": (_einsum("bsk,kn->bsn"), X, W, None, {"axis": 0}, P("dp", None, "tp"), P("tp"), P("dp")),
    "einsum, batch": (
        _einsum("bsk,bkn->bsn"),
        X,
        W_BATCHED,
        X_CAST,
        W_CAST,
        P("dp"),
        P("dp", None, "tp"),
        P("dp", None, "tp"),
    ),
    "vmap": (
        (jax.vmap(sd.matmul), jax.vmap(jnp.matmul)),
        X,
        W_BATCHED,
        X_CAST,
        W_CAST,
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
def test_batched_matmuls_of_sharded_arrays_match_a_single_device(case, format, kind):
    (function, plain), x_shape, w_shape, x_cast, w_cast, x_spec, w_spec, y_spec = BATCHED[case]
    x, w = normal(0, *x_shape), sd.quantize(normal(1, *w_shape), format, **w_cast)
    x = x if x_cast is None else sd.quantize(x, format, **x_cast)
    mesh = mesh_of(kind)
    options = {"out_sharding": y_spec} if kind == AxisType.Explicit and case.startswith("einsum") else {}
    found = run_on(mesh, functools.partial(function, **options), (x, w), (x_spec, w_spec))
    require_close(found, function(x, w), plain, (x, w), 256)
    require_sharding(found, mesh, y_spec)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
@pytest.mark.parametrize("format", FORMATS)
def test_casts_under_vmap_are_sharded_as_their_arrays(format, kind):
    x, mesh = normal(0, *X), mesh_of(kind)

    def cast(x):
        q = jax.vmap(functools.partial(sd.quantize, format=format, block=128))(x)
        return q, jax.vmap(sd.dequantize)(q)

    (q, values), expected = run_on(mesh, cast, (x,), (P("dp", None, "tp"),)), cast(x)
    for a, b in zip(jax.tree.leaves((q, values)), jax.tree.leaves(expected), strict=True):
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()
    for a in (q.data, q.scale, values):
        require_sharding(a, mesh, P("dp", None, "tp"))


SIZES = np.array([10, 0, 30, 20])
GROUPED = {
    "columns": (P(), P(None, None, "tp"), P(None, "tp")),
    "rows": (P(None, "tp"), P(None, "tp"), P()),
    "groups": (P("dp"), P("dp"), P("dp")),
}


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("layout", GROUPED)
def test_ragged_dots_of_sharded_arrays_match_a_single_device(layout, format, kind):
    x, w = normal(0, 64, 256), sd.quantize(normal(1, 4, 256, 256), format, **W_CAST)
    mesh, (x_spec, w_spec, y_spec) = mesh_of(kind), GROUPED[layout]
    options = {"out_sharding": y_spec} if kind == AxisType.Explicit else {}
    function = functools.partial(sd.ragged_dot, **options)
    found = run_on(mesh, function, (x, w, SIZES), (x_spec, w_spec, P()))
    plain = functools.partial(jax.lax.ragged_dot, group_sizes=jnp.asarray(SIZES))
    require_close(found, sd.ragged_dot(x, w, SIZES), plain, (x, w), 256)
    if kind == AxisType.Explicit:
        require_sharding(found, mesh, y_spec)
    else:  # XLA chooses the sharding
        values = jnp.asarray(sd.dequantize(w))
        of_plain = run_on(mesh, jax.lax.ragged_dot, (x, values, SIZES), (x_spec, w_spec, P()))
        require_sharding(found, mesh, of_plain.sharding.spec)


def test_ragged_dots_on_explicit_axes_require_out_sharding():
    mesh = mesh_of(AxisType.Explicit)
    arrays = normal(0, 64, 256), sd.quantize(normal(1, 4, 256, 256), "int8"), SIZES
    with pytest.raises(ValueError, match="pass `out_sharding`, the sharding of the result"):
        run_on(mesh, sd.ragged_dot, arrays, (P(), P(None, None, "tp"), P()))


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("layout", ["column", "row"])
def test_convolutions_of_sharded_arrays_match_a_single_device(layout, format, kind):
    x = sd.quantize(normal(0, 8, 6, 5, 64), format, axis=(1, 2, 3), block=(0, 0, 0))
    w = sd.quantize(normal(1, 3, 3, 64, 32), format, axis=(0, 1, 2), block=(0, 0, 0))
    x_spec, w_spec, y_spec = {
        "column": (P("dp"), P(None, None, None, "tp"), P("dp", None, None, "tp")),
        "row": (P("dp", None, None, "tp"), P(None, None, "tp"), P("dp")),
    }[layout]
    window = {"window_strides": (1, 1), "padding": "SAME", "dimension_numbers": ("NHWC", "HWIO", "NHWC")}
    mesh = mesh_of(kind)
    options = {"out_sharding": y_spec} if kind == AxisType.Explicit else {}
    found = run_on(mesh, functools.partial(sd.conv_general_dilated, **window, **options), (x, w), (x_spec, w_spec))
    plain = functools.partial(jax.lax.conv_general_dilated, **window)
    require_close(found, sd.conv_general_dilated(x, w, **window), plain, (x, w), 9 * 64)
    require_sharding(found, mesh, y_spec)
