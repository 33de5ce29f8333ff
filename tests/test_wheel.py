"""The wheel contains every file of the package, and works with only its declared dependencies.

Nothing is downloaded: the wheel is built by the setuptools of this environment and installed into a new environment.
The distributions that its metadata requires are linked there from this one; Flax is not among them.
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


def run(*command, **options) -> str:
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, timeout=60, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def package_files() -> list[str]:
    """Returns the path of every file of the package, as in a wheel."""
    files = (path.relative_to(ROOT) for path in PACKAGE.rglob("*") if path.is_file())
    return sorted(str(path) for path in files if "__pycache__" not in path.parts)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """Builds the wheel from a copy of the sources.

    setuptools leaves a build folder in the sources, whose files later wheels would contain.
    """
    assert Version(importlib.metadata.version("setuptools")) >= Version("77"), "install `.[dev]`"
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
    """Returns the names of required distributions, without those of extras."""
    requirements = map(Requirement, lines or [])
    return {r.name for r in requirements if r.marker is None or r.marker.evaluate({"extra": ""})}


def dependencies(wheel: Path) -> dict[str, importlib.metadata.Distribution]:
    """Returns the transitive dependencies of the wheel."""
    found: dict[str, importlib.metadata.Distribution] = {}
    names = required(metadata(wheel).get_all("Requires-Dist"))
    while names - set(found):
        found |= {name: importlib.metadata.distribution(name) for name in names - set(found)}
        names = names.union(*(required(distribution.requires) for distribution in found.values()))
    return found


@pytest.fixture(scope="module")
def environment(wheel, tmp_path_factory) -> Path:
    """Returns the bin folder of an environment with only the wheel and its dependencies."""
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


def run_isolated(*command, cwd: Path) -> str:
    """Runs a command in `cwd`, outside the sources, without PYTHON* variables and XLA_FLAGS."""
    variables = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "XLA_FLAGS"))}
    return run(*command, cwd=cwd, env=variables)


def test_the_wheel_contains_every_file_of_the_package(wheel):
    with zipfile.ZipFile(wheel) as archive:
        contained = sorted(name for name in archive.namelist() if ".dist-info/" not in name)
    assert contained == package_files()
    data = [name for name in contained if not name.endswith(".py")]
    for name in ("py.typed", "plan/models.json", "plan/devices/h200.json", "kernels/hopper/tuned/nvidia-h200.json"):
        assert f"scaledot/{name}" in data


def test_the_wheel_has_the_version_and_the_dependencies_of_the_package(wheel):
    fields = metadata(wheel)
    assert fields["Version"] == sd.__version__
    assert required(fields.get_all("Requires-Dist")) == {"jax", "numpy", "ml_dtypes"}


def test_the_console_script_runs(environment, tmp_path):
    assert run_isolated(environment / "scaledot", "--version", cwd=tmp_path) == f"scaledot {sd.__version__}\n"
    found = json.loads(run_isolated(environment / "scaledot", "formats", "--json", cwd=tmp_path))
    assert [row["name"] for row in found["formats"]] == list(sd.FORMATS)


USE_EVERY_NAME = """
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


def test_all_names_work_without_flax_except_linen_and_nnx(environment, tmp_path):
    from scaledot.plan.models import MODELS
    from scaledot.plan.rates import RATES

    printed = run_isolated(environment / "python", "-c", USE_EVERY_NAME, cwd=tmp_path)
    path, models, rates, tiles, without_flax = json.loads(printed)
    assert Path(path).is_relative_to(environment.parent)
    assert (models, rates) == (list(MODELS), list(RATES))
    assert tiles > 0
    assert "flax" in without_flax
