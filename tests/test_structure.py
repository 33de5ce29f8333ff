"""The house: imports point down, importing is light, and compiled code still rounds."""

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

pytestmark = pytest.mark.optimized  # bits and compiled programs are what is tested here

ROOT = Path(sd.__file__).parent
LAYERS = [  # an import may only point to its own layer or further down
    {"deprecated", "hashing", "programs", "parallel.types", "parallel.divisibility"},
    {"formats", "format_variants"},
    {"numerics"},
    {"recipes", "path_patterns"},
    {"serialization", "shape_ops", "array", "state", "contraction"},
    {"kernels"},
    {"ops", "parallel"},
    {"train", "checkpoint_policies"},
    {"flax_hooks", "inference"},
    {"linen", "nnx", "orbax"},
    {"compat", "plan"},
    {"cli"},
    {"__main__"},
]
LEVEL = {room: level for level, rooms in enumerate(LAYERS) for room in rooms}


def modules():
    return [path for path in ROOT.rglob("*.py") if path != ROOT / "__init__.py"]


def imported_rooms(path):
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, f"{path.name} imports relatively"
            names = [
                f"{node.module}.{alias.name}" if node.module == "scaledot" else node.module for alias in node.names
            ]
        yield from (name for name in names)


@pytest.mark.parametrize("path", modules(), ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_point_down(path):
    level = level_of(path.relative_to(ROOT).with_suffix("").parts)
    for name in imported_rooms(path):
        if name.startswith("scaledot."):
            assert level_of(name.split(".")[1:]) <= level, f"{path.name} imports {name}, which lies above it"


def level_of(parts) -> int:
    """The layer of a module: its own if it has one, else that of its room."""
    for name in (".".join(parts[:2]), parts[0]):
        if name in LEVEL:
            return LEVEL[name]
    raise AssertionError(f"{parts[0]} has no layer; give it one")


def imports() -> dict[str, set[str]]:
    """By module of the library, the modules of the library that it imports, also inside functions."""
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


def test_no_files_import_each_other_in_a_circle():
    remaining = imports()
    while free := {name for name, needed in remaining.items() if not needed & set(remaining)}:
        remaining = {name: needed for name, needed in remaining.items() if name not in free}
    circle = {name: sorted(needed & set(remaining)) for name, needed in remaining.items()}
    assert not circle, f"these files, or files that they import, import each other: {circle}"


def test_only_kernels_know_backends():
    """Of a device, everybody else knows rows of the kernel table."""
    above = {name: needed for name, needed in imports().items() if not name.startswith("scaledot.kernels")}
    commands = {"scaledot.cli.tune"}  # `scaledot tune` measures tiles of the kernels
    found = {n: m for n, needed in above.items() for m in needed if ".hopper" in m and n not in commands}
    assert not found


def test_the_design_notes_name_every_file():
    notes = ROOT.parent / "docs" / "notes" / "design.md"
    layers = notes.read_text().split("```")[1]
    named = set(re.findall(r"\w+", layers))
    rooms = [path for path in modules() if path.stem != "__init__" and "compat" not in path.parts]
    assert sorted(str(path.relative_to(ROOT)) for path in rooms if path.stem not in named) == []


PATCHES = sorted((Path(__file__).parent / "mutations" / "patches").glob("*.patch"))


@pytest.mark.parametrize("path", PATCHES, ids=lambda p: p.stem)
def test_faults_to_be_noticed_are_faults_of_this_tree(path):
    """Every patch of `tests.mutations` applies: the lines that it changes are in its file, once."""
    lines = path.read_text().splitlines()
    (target,) = (line.removeprefix("--- a/") for line in lines if line.startswith("--- a/"))
    hunk = lines[next(at for at, line in enumerate(lines) if line.startswith("@@")) + 1 :]
    before = "\n".join(line[1:] for line in hunk if line[0] in " -")
    assert (ROOT.parent / target).read_text().count(before) == 1


@pytest.mark.parametrize("path", modules(), ids=lambda p: str(p.relative_to(ROOT)))
def test_nothing_private_of_jax_is_used(path):
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


def test_the_public_names_are_those_that_type_checkers_see():
    tree = ast.parse((ROOT / "__init__.py").read_text())
    guarded = next(node for node in tree.body if isinstance(node, ast.If))
    imports = [(alias.name, node.module) for node in guarded.body for alias in node.names]
    homes = {name: f"scaledot.{home}".rpartition(".")[0] for name, home in sd._SUBMODULES.items()}
    rooms = {name for name, module in imports if homes.get(name) == module}
    seen = {(name, module) for name, module in imports if name not in rooms}
    assert rooms == set(sd._SUBMODULES)
    assert seen == {(name, f"scaledot.{home}") for name, home in sd._MODULE_OF.items()}
    assert set(sd.__all__) == {*sd._MODULE_OF, *rooms}
    assert all(getattr(sd, name) is not None for name in sd.__all__)
    with pytest.raises(AttributeError, match="no attribute 'quantise'"):
        sd.quantise  # noqa: B018
    assert set(sd.__all__) <= set(dir(sd))


@pytest.mark.parametrize("format", EACH_FORMAT)
def test_compiled_quantise_dequantise_still_rounds(format):
    """On a GPU XLA deletes a cast to a narrow float and back as excess precision, also across nested jit.

    The codes are therefore made by integer arithmetic: no convert from float32 to a narrow float may appear
    in the compiled program, because any such convert next to its inverse could be dropped.
    """
    x = np.random.default_rng(0).standard_normal((64, 128)).astype(np.float32)
    compiled = jax.jit(lambda x: sd.dequantize(sd.quantize(x, format))).lower(x).compile()
    got = np.asarray(compiled(x))
    np.testing.assert_array_equal(got, sd.dequantize(sd.quantize(x, format)))
    assert np.mean(got != x) > 0.9
    narrow_casts = re.findall(
        r"= (?:f8|f4|bf16)\w*\[[^=]*= ?\S* convert\(|= (?:f8\w+|f4\w+)\S* convert\(", compiled.as_text()
    )
    assert not narrow_casts


def test_the_rotation_rounds_to_bfloat16_where_it_says_so():
    """reduce-precision is never dropped; a pair of converts would be."""
    x = jnp.ones((16, 64), jnp.float32)
    text = jax.jit(lambda x: sd.quantize(x, "nvfp4", rotation=sd.Hadamard())).lower(x).compile().as_text()
    assert text.count("reduce-precision(") >= 2


@pytest.mark.parametrize("format", EACH_FORMAT)
def test_a_jitted_quantize_needs_little_memory(format):
    x = jax.ShapeDtypeStruct((512, 1024), jnp.float32)
    memory = jax.jit(lambda x: sd.quantize(x, format)).lower(x).compile().memory_analysis()
    assert memory.temp_size_in_bytes <= 1.5 * 512 * 1024 * 4
