"""Structure of the package: import layers, what importing loads, public names, and properties of compiled casts."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tables import EACH_FORMAT

import scaledot as sd
from tests.mutations import mutants

pytestmark = pytest.mark.optimized  # compares bits and inspects compiled programs

ROOT = Path(sd.__file__).parent
LAYERS = [  # from the bottom up: a module imports only from its own layer and lower ones
    {"deprecated", "hashing", "programs", "parallel.types", "parallel.divisibility"},
    {"formats", "format_variants"},
    {"numerics"},
    {"recipes", "path_patterns", "schedules"},
    {"serialization", "shape_ops", "array", "state", "contraction"},
    {"kernels"},
    {"ops", "parallel"},
    {"train", "checkpoint_policies"},
    {"flax_hooks", "inference", "transform"},
    {"linen", "nnx", "orbax", "lora", "checkpoint"},
    {"compat", "plan"},
    {"cli"},
    {"__main__"},
]
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}


def modules():
    return [path for path in ROOT.rglob("*.py") if path != ROOT / "__init__.py"]


def imported_names(path):
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, f"{path.name} has a relative import"
            names = [
                f"{node.module}.{alias.name}" if node.module == "scaledot" else node.module for alias in node.names
            ]
        yield from (name for name in names)


@pytest.mark.parametrize("path", modules(), ids=lambda p: str(p.relative_to(ROOT)))
def test_a_module_imports_only_its_own_and_lower_layers(path):
    level = level_of(path.relative_to(ROOT).with_suffix("").parts)
    for name in imported_names(path):
        if name.startswith("scaledot."):
            assert level_of(name.split(".")[1:]) <= level, f"{path.name} imports {name}, which is in a higher layer"


def level_of(parts) -> int:
    """Returns the layer of a module if it has one, else of its package."""
    for name in (".".join(parts[:2]), parts[0]):
        if name in LEVEL:
            return LEVEL[name]
    raise AssertionError(f"{parts[0]} has no layer; add it to LAYERS")


def imports() -> dict[str, set[str]]:
    """Returns the modules of the library that each module imports, including imports inside functions."""
    names = {
        ".".join(("scaledot", *p.relative_to(ROOT).with_suffix("").parts)).removesuffix(".__init__"): p
        for p in modules()
    }
    found: dict[str, set[str]] = {}
    for name, path in names.items():
        nodes = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ImportFrom)]
        targets = ((f"{node.module}.{alias.name}", node.module) for node in nodes for alias in node.names)
        found[name] = {full if full in names else module for full, module in targets} & set(names) - {name}
    return found


def test_there_are_no_import_cycles():
    remaining = imports()
    while free := {name for name, needed in remaining.items() if not needed & set(remaining)}:
        remaining = {name: needed for name, needed in remaining.items() if name not in free}
    cycle = {name: sorted(needed & set(remaining)) for name, needed in remaining.items()}
    assert not cycle, f"these modules, or modules that they import, form a cycle: {cycle}"


def test_only_kernels_import_backends():
    """Other modules use the rows of the kernel tables."""
    others = {name: needed for name, needed in imports().items() if not name.startswith("scaledot.kernels")}
    commands = {"scaledot.cli.tune"}  # `scaledot tune` measures the kernels
    found = {n: m for n, needed in others.items() for m in needed if ".hopper" in m and n not in commands}
    assert not found


def test_the_design_notes_name_every_module():
    notes = ROOT.parent / "docs" / "notes" / "design.md"
    layers = notes.read_text().split("```")[1]
    named = set(re.findall(r"\w+", layers))
    paths = [path for path in modules() if path.stem != "__init__" and "compat" not in path.parts]
    assert sorted(str(path.relative_to(ROOT)) for path in paths if path.stem not in named) == []


PATCHES = sorted((Path(__file__).parent / "mutations" / "patches").glob("*.patch"))


@pytest.mark.parametrize("path", PATCHES, ids=lambda p: p.stem)
def test_patches_of_named_mutants_apply(path):
    """The lines that a patch of `tests.mutations` changes are in its file exactly once."""
    lines = path.read_text().splitlines()
    (target,) = (line.removeprefix("--- a/") for line in lines if line.startswith("--- a/"))
    hunk = lines[next(at for at, line in enumerate(lines) if line.startswith("@@")) + 1 :]
    before = "\n".join(line[1:] for line in hunk if line[0] in " -")
    assert (ROOT.parent / target).read_text().count(before) == 1


@pytest.mark.parametrize("location", [*mutants.EXCLUDED, *(name.split("#")[0] for name in mutants.EQUIVALENT)])
def test_code_that_is_not_mutated_exists(location):
    file, _, function = location.partition(":")
    path = ROOT.parent / file
    assert path.exists()
    if function:
        assert function in {getattr(node, "name", None) for node in ast.walk(ast.parse(path.read_text()))}


@pytest.mark.parametrize("path", modules(), ids=lambda p: str(p.relative_to(ROOT)))
def test_private_modules_of_jax_are_not_used(path):
    assert "jax._src" not in path.read_text()


def test_importing_all_but_flax_modules_loads_jax_and_numpy_only():
    code = """
import sys, jax, ml_dtypes
before = set(sys.modules)
import scaledot
for name in set(scaledot.__all__) - {'linen', 'nnx'}:
    getattr(scaledot, name)
new = {name.split('.')[0] for name in set(sys.modules) - before}
print(sorted(n for n in new if n not in sys.stdlib_module_names and n != 'jax'))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "['scaledot']"


def test_lazily_imported_names_are_those_that_type_checkers_see():
    tree = ast.parse((ROOT / "__init__.py").read_text())
    guarded = next(node for node in tree.body if isinstance(node, ast.If))
    imports = [(alias.name, node.module) for node in guarded.body for alias in node.names]
    parents = {name: f"scaledot.{path}".rpartition(".")[0] for name, path in sd._SUBMODULES.items()}
    submodules = {name for name, module in imports if parents.get(name) == module}
    other = {(name, module) for name, module in imports if name not in submodules}
    assert submodules == set(sd._SUBMODULES)
    assert other == {(name, f"scaledot.{module}") for name, module in sd._MODULE_OF.items()}
    assert set(sd.__all__) == {*sd._MODULE_OF, *submodules}
    assert all(getattr(sd, name) is not None for name in sd.__all__)
    with pytest.raises(AttributeError, match="no attribute 'quantise'"):
        sd.quantise  # noqa: B018
    assert set(sd.__all__) <= set(dir(sd))


@pytest.mark.parametrize("format", EACH_FORMAT)
def test_compiled_quantise_dequantise_still_rounds(format):
    """On GPUs XLA removes a cast to a narrow float and back (excess precision), also across nested jit.

    Codes are therefore computed by integer arithmetic: no convert from float32 to a narrow float may be in the compiled
    program, because XLA could remove it together with its inverse.
    """
    x = np.random.default_rng(0).standard_normal((64, 128)).astype(np.float32)
    compiled = jax.jit(lambda x: sd.dequantize(sd.quantize(x, format))).lower(x).compile()
    y = np.asarray(compiled(x))
    np.testing.assert_array_equal(y, sd.dequantize(sd.quantize(x, format)))
    assert np.mean(y != x) > 0.9
    narrow_casts = re.findall(
        r"= (?:f8|f4|bf16)\w*\[[^=]*= ?\S* convert\(|= (?:f8\w+|f4\w+)\S* convert\(", compiled.as_text()
    )
    assert not narrow_casts


def test_the_rotation_rounds_to_bfloat16_by_reduce_precision():
    """XLA never removes reduce-precision, but may remove a pair of converts."""
    x = jnp.ones((16, 64), jnp.float32)
    text = jax.jit(lambda x: sd.quantize(x, "nvfp4", rotation=sd.Hadamard())).lower(x).compile().as_text()
    assert text.count("reduce-precision(") >= 2


@pytest.mark.parametrize("format", EACH_FORMAT)
def test_a_jitted_quantize_needs_little_memory(format):
    x = jax.ShapeDtypeStruct((512, 1024), jnp.float32)
    memory = jax.jit(lambda x: sd.quantize(x, format)).lower(x).compile().memory_analysis()
    assert memory.temp_size_in_bytes <= 1.5 * 512 * 1024 * 4
