"""`compat.transformer_engine.install`: programs that import transformer_engine get scaledot's modules."""

import subprocess
import sys

import pytest

PROGRAM = """
import sys
import transformer_engine.jax
import transformer_engine.jax as te
import transformer_engine.jax.cpp_extensions as tex
from transformer_engine.common import recipe
from transformer_engine.common.recipe import DelayedScaling
from transformer_engine.jax.flax import make_dot_general_cls
from transformer_engine.jax.quantize import QuantizerFactory
import transformer_engine.jax.flax.module, transformer_engine.jax.sharding, transformer_engine.jax.attention
from scaledot.compat import transformer_engine as ours

assert te is ours and te.__name__ == te.__spec__.name == "scaledot.compat.transformer_engine", te.__spec__
assert tex is ours.cpp_extensions and recipe is ours.recipe and transformer_engine.jax.flax is ours.flax
assert QuantizerFactory is ours.QuantizerFactory and DelayedScaling is ours.DelayedScaling
executed_twice = [name for name, module in sys.modules.items() if name == module.__name__ and ".jax" in name
                  and name.startswith("transformer_engine")]
assert not executed_twice, executed_twice
tex.collective_gemm_bootstrap(8, 8, 0, 4)
for statement, error in {
    "import transformer_engine.pytorch": "No module named 'transformer_engine.pytorch'",
    "import transformer_engine.jax.nothing": "No module named 'transformer_engine.jax.nothing'",
    "from transformer_engine.jax.flax import TransformerLayer": "'TransformerLayer' is not provided: compose it of",
}.items():
    try:
        exec(statement)
    except ImportError as raised:
        assert error in str(raised), raised
    else:
        raise AssertionError(statement)
print(*sys.argv[1:])
"""


def run(arguments, cwd):
    return subprocess.run(
        [sys.executable, *arguments], cwd=cwd, capture_output=True, text=True, timeout=120, check=False
    )


def test_a_program_runs_under_the_alias(tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM)
    done = run(["-m", "scaledot.compat.transformer_engine", "program", "a", "--b"], tmp_path)
    assert (done.returncode, done.stdout) == (0, "a --b\n"), done.stderr


def test_the_alias_is_refused_where_transformer_engine_is_installed(tmp_path):
    (tmp_path / "transformer_engine").mkdir()
    (tmp_path / "transformer_engine" / "__init__.py").write_text("")
    done = run(["-m", "scaledot.compat.transformer_engine", "program"], tmp_path)
    assert done.returncode != 0
    assert "RuntimeError: TransformerEngine is installed" in done.stderr


@pytest.mark.parametrize("arguments", [[], ["--help"]])
def test_the_launcher_needs_a_module(arguments, tmp_path):
    done = run(["-m", "scaledot.compat.transformer_engine", *arguments], tmp_path)
    assert done.returncode != 0
    assert done.stderr == "usage: python -m scaledot.compat.transformer_engine MODULE [ARGUMENT ...]\n"


def test_installing_twice_does_nothing(tmp_path):
    done = run(["-c", "from scaledot.compat.transformer_engine import install; install(); install()"], tmp_path)
    assert done.returncode == 0, done.stderr
