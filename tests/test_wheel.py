"""The wheel: it carries every file of the package, and runs with its declared dependencies alone.

Nothing is downloaded: the wheel is built by the setuptools of this environment and installed into an empty one, into
which only the distributions that its metadata requires, which Flax is not among, are linked from this one.
"""

import importlib.metadata
import json
import os
import subprocess
import sys
import venv
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

import scaledot as sd

pytestmark = pytest.mark.jax_versions  # dependencies differ between releases

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "scaledot"
SOURCES = ("pyproject.toml", "README.md", "LICENSE")


def run(*words, **how) -> str:
    done = subprocess.run([str(word) for word in words], capture_output=True, text=True, timeout=60, **how)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def package_files() -> list[str]:
    """Every file of the package, by its path in a wheel."""
    files = (path.relative_to(ROOT) for path in PACKAGE.rglob("*") if path.is_file())
    return sorted(str(path) for path in files if "__pycache__" not in path.parts)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """Built from a copy: setuptools leaves a build folder behind, whose files later wheels would carry."""
    assert Version(importlib.metadata.version("setuptools")) >= Version("77"), "the build needs what `.[dev]` installs"
    source, built = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in (*SOURCES, *package_files()):
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_bytes((ROOT / name).read_bytes())
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "wheel", "--no-index", "--no-deps"]
    run(*pip, "--no-build-isolation", "--wheel-dir", built, source)
    (path,) = built.iterdir()
    return path


def metadata(wheel: Path):
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        return Parser().parsestr(archive.read(name).decode())


def required(lines: list[str] | None) -> set[str]:
    """Names of distributions, without those of extras."""
    requirements = map(Requirement, lines or [])
    return {of.name for of in requirements if of.marker is None or of.marker.evaluate({"extra": ""})}


def dependencies(wheel: Path) -> dict[str, importlib.metadata.Distribution]:
    """The distributions that the wheel needs, and those that these need."""
    found: dict[str, importlib.metadata.Distribution] = {}
    names = required(metadata(wheel).get_all("Requires-Dist"))
    while names - set(found):
        found |= {name: importlib.metadata.distribution(name) for name in names - set(found)}
        names = names.union(*(required(distribution.requires) for distribution in found.values()))
    return found


@pytest.fixture(scope="module")
def bare(wheel, tmp_path_factory) -> Path:
    """The bin folder of an environment that has the wheel and what it needs."""
    home = tmp_path_factory.mktemp("environment")
    venv.create(home, with_pip=False, symlinks=True)
    python = home / "bin" / "python"
    code = "import sysconfig; print(sysconfig.get_path('purelib'))"
    packages = Path(run(python, "-c", code).strip())
    for distribution in dependencies(wheel).values():
        for name in {file.parts[0] for file in distribution.files or ()} - {"..", "__pycache__"}:
            (packages / name).symlink_to(Path(str(distribution.locate_file(name))))
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", python, "install"]
    run(*pip, "--no-index", "--no-deps", "--no-compile", wheel)
    return home / "bin"


def run_bare(*words, cwd: Path) -> str:
    """Without what this environment tells Python, and away from the sources."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "XLA_FLAGS"))}
    return run(*words, cwd=cwd, env=environment)


def test_the_wheel_carries_every_file_of_the_package(wheel):
    with zipfile.ZipFile(wheel) as archive:
        carried = sorted(name for name in archive.namelist() if ".dist-info/" not in name)
    assert carried == package_files()
    data = [name for name in carried if not name.endswith(".py")]
    for name in ("py.typed", "plan/models.json", "plan/devices/h200.json", "kernels/hopper/tuned/nvidia-h200.json"):
        assert f"scaledot/{name}" in data


def test_the_wheel_has_the_version_and_the_dependencies_of_the_package(wheel):
    fields = metadata(wheel)
    assert fields["Version"] == sd.__version__
    assert required(fields.get_all("Requires-Dist")) == {"jax", "numpy", "ml_dtypes"}


def test_the_console_script_runs(bare, tmp_path):
    assert run_bare(bare / "scaledot", "--version", cwd=tmp_path) == f"scaledot {sd.__version__}\n"
    found = json.loads(run_bare(bare / "scaledot", "formats", "--json", cwd=tmp_path))
    assert [row["name"] for row in found["formats"]] == list(sd.FORMATS)


USED = """
import importlib.util, json, sys
import scaledot
from scaledot.kernels.hopper import tile_configs
from scaledot.plan.models import MODELS
from scaledot.plan.rates import RATES

assert importlib.util.find_spec("flax") is None
for name in set(scaledot.__all__) - {"linen", "nnx"}:
    getattr(scaledot, name)
try:
    scaledot.linen
except ImportError as error:
    without_flax = str(error)
tiles = len(json.loads(tile_configs._path("NVIDIA H200").read_text())["matmul"])
print(json.dumps([scaledot.__file__, list(MODELS), list(RATES), tiles, without_flax]))
"""


def test_everything_but_flax_is_used_from_the_wheel(bare, tmp_path):
    from scaledot.plan.models import MODELS
    from scaledot.plan.rates import RATES

    place, models, rates, tiles, without_flax = json.loads(run_bare(bare / "python", "-c", USED, cwd=tmp_path))
    assert Path(place).is_relative_to(bare.parent)
    assert (models, rates) == (list(MODELS), list(RATES))
    assert tiles > 0
    assert "flax" in without_flax
