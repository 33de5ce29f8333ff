"""Checkpoints: loading, memory, listing and conversion, against a memory map, safetensors and compressed-tensors.

A checkpoint of SIZE × SIZE matrices with 2 GiB in total is written to a temporary folder and read from the page cache.

* load: seconds of `checkpoint.load` in bfloat16 and fine-grained FP8, of a copy of the same file's memory map, and of
  `safetensors.numpy.load_file`, which cannot read FP8. Loads alternate, each in this process.
* memory: anonymous memory (RssAnon) of a new process after loading, beyond that before, and the bytes of the tensors.
* inspect: seconds of the command, of `import jax` in a new interpreter, and of the function.
* convert: seconds from bfloat16 files to NVFP4 files of compressed-tensors' layout, and of the library's own functions
  on the same matrices with the same result, bit for bit (skipped if it is not installed).
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import scaledot as sd
from benchmarks import record
from benchmarks.timing import interleaved
from scaledot import checkpoint
from scaledot.checkpoint import safetensors
from scaledot.checkpoint.saving import Entry, write_folder

SIZE = 4096  # rows and columns of a matrix
TOTAL_BYTES = 2**31
CONVERTED_BYTES = 2**28
TARGETS = {  # of the ratios below
    "memmap copy / load of bf16": 0.7,
    "memmap copy / load of FP8": 0.7,
    "load / safetensors.numpy": 1.2,
    "compressed-tensors / convert": 4.0,
}


def run(size: int, repeats: int) -> dict[str, Any]:
    """Runs all measurements. repeats: rounds of loads; conversions are repeated a third as often."""
    total = min(TOTAL_BYTES, 64 * size * size * 2)
    with tempfile.TemporaryDirectory(prefix="scaledot-checkpoints-") as folder:
        bf16, fp8 = (_written(Path(folder) / kind, size, total, kind) for kind in ("bf16", "fp8"))
        measured: dict[str, Any] = {"load": _loads(bf16, fp8, repeats)}
        measured["memory"] = {path.name: _memory(path) for path in (bf16, fp8)}
        measured["inspect_seconds"] = _inspect_seconds(bf16)
        small = _written(Path(folder) / "small", size, min(CONVERTED_BYTES, total), "bf16")
        measured["convert"] = _conversions(small, Path(folder), max(1, repeats // 3))
    ratios = _ratios(measured)
    for name, ratio in ratios.items():
        print(f"{name}: {ratio:.2f}" + (f" (target {TARGETS[name]})" if name in TARGETS else ""))
    return {
        "environment": record.environment()
        | {p: record.version(p) for p in ("safetensors", "torch", "compressed-tensors")},
        "size": size,
        "bytes": total,
        **measured,
        "ratios": ratios,
    }


def _written(path: Path, size: int, total: int, kind: str) -> Path:
    """Writes matrices of normal numbers, each computed when it is written."""
    nbytes = size * size * (2 if kind == "bf16" else 1)

    def matrix(seed: int) -> Any:
        x = jax.random.normal(jax.random.key(seed), (size, size), jnp.bfloat16)
        return x if kind == "bf16" else sd.quantize(x, "fp8_e4m3", block=(128, 128))

    type_of = jax.eval_shape(matrix, 0)
    entries = {
        f"model.layers.{i}.mlp.up_proj.weight": Entry(type_of, lambda i=i: matrix(i)) for i in range(total // nbytes)
    }
    layout = "scaledot" if kind == "bf16" else "hf-fp8"
    write_folder(path, entries, layout, {"torch_dtype": "bfloat16"}, max_shard_bytes=2**34)
    return path


def _file(path: Path) -> Path:
    return path / "model.safetensors"


def _loads(bf16: Path, fp8: Path, repeats: int) -> dict[str, Any]:
    calls = {
        "memmap copy of bf16": lambda: np.array(np.memmap(_file(bf16), np.uint8, "r")),
        "memmap copy of FP8": lambda: np.array(np.memmap(_file(fp8), np.uint8, "r")),
        "load of bf16": lambda: checkpoint.load(bf16),
        "load of FP8": lambda: checkpoint.load(fp8),
    }
    if record.version("safetensors") is not None:
        from safetensors.numpy import load_file  # pyright: ignore[reportMissingImports]

        calls["safetensors.numpy of bf16"] = lambda: load_file(_file(bf16))
    return {name: {"median": times.median, "min": times.min} for name, times in interleaved(calls, repeats).items()}


_MEMORY = """
import json, re, sys
import jax
jax.block_until_ready(jax.numpy.ones(8) + 1)
from scaledot import checkpoint
def anonymous():
    return 1024 * int(re.search(r"RssAnon:\\s+(\\d+)", open("/proc/self/status").read())[1])
before = anonymous()
tree = jax.block_until_ready(checkpoint.load(sys.argv[1]))
nbytes = sum(leaf.nbytes for leaf in jax.tree.leaves(tree))
print(json.dumps({"anonymous_bytes": anonymous() - before, "tensor_bytes": nbytes}))
"""


def _memory(path: Path) -> dict[str, int]:
    output = subprocess.run([sys.executable, "-c", _MEMORY, path], check=True, capture_output=True, text=True).stdout
    return json.loads(output.splitlines()[-1])


def _inspect_seconds(path: Path) -> dict[str, float]:
    def command(*words: str) -> float:
        start = time.perf_counter()
        subprocess.run([sys.executable, *words], check=True, stdout=subprocess.DEVNULL)
        return time.perf_counter() - start

    times = interleaved({"function": lambda: checkpoint.inspect(path)}, 5)
    return {
        "command": min(command("-m", "scaledot", "inspect", str(path)) for _ in range(5)),
        "import jax": min(command("-c", "import jax") for _ in range(5)),
        "function": times["function"].min,
    }


def _conversions(source: Path, folder: Path, repeats: int) -> dict[str, Any]:
    target, peer_target = folder / "nvfp4", folder / "peer.safetensors"
    calls = {
        "convert": lambda: checkpoint.convert(source, target, "compressed-tensors", format="compressed_tensors.nvfp4")
    }
    if record.version("compressed-tensors") is not None:
        calls["compressed-tensors"] = lambda: _convert_with_peer(_file(source), peer_target)
    times = interleaved(calls, repeats)
    if "compressed-tensors" in times:
        _check_equal(_file(target), peer_target)
    return {name: {"median": t.median, "min": t.min} for name, t in times.items()}


def _convert_with_peer(source: Path, target: Path) -> None:
    """The same conversion by the functions of compressed-tensors, with all cores, from file to file."""
    import torch  # pyright: ignore[reportMissingImports]
    from compressed_tensors.compressors import BaseCompressor  # pyright: ignore[reportMissingImports]
    from compressed_tensors.quantization import preset_name_to_scheme  # pyright: ignore[reportMissingImports]
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam  # pyright: ignore[reportMissingImports]
    from safetensors import safe_open  # pyright: ignore[reportMissingImports]
    from safetensors.torch import save_file  # pyright: ignore[reportMissingImports]

    torch.set_num_threads(os.cpu_count() or 1)
    scheme = preset_name_to_scheme("NVFP4A16", ["Linear"])
    compressor = BaseCompressor.get_value_from_registry("nvfp4-pack-quantized")
    compressed = {}
    with safe_open(source, "pt") as file:
        for name in file.keys():  # noqa: SIM118 (the file is not iterable)
            weight = file.get_tensor(name)
            global_scale = generate_gparam(weight.min(), weight.max())
            groups = weight.unflatten(-1, (-1, scheme.weights.group_size))
            scale, _ = calculate_qparams(groups.amin(-1), groups.amax(-1), scheme.weights, global_scale=global_scale)
            state = {"weight": weight, "weight_scale": scale, "weight_global_scale": global_scale}
            module = name.removesuffix(".weight")
            compressed |= {f"{module}.{key}": value for key, value in compressor.compress(state, scheme).items()}
    save_file(compressed, target)


def _check_equal(ours: Path, theirs: Path) -> None:
    a, b = (safetensors.read_header(path) for path in (ours, theirs))
    for name, tensor in b.tensors.items():
        own = a.tensors[name]
        with ours.open("rb") as x, theirs.open("rb") as y:
            x.seek(own.start)
            y.seek(tensor.start)
            if x.read(own.nbytes) != y.read(tensor.nbytes):
                raise AssertionError(f"{name} differs from that of compressed-tensors")


def _ratios(measured: dict[str, Any]) -> dict[str, float]:
    load, convert = measured["load"], measured["convert"]
    ratios = {
        "memmap copy / load of bf16": load["memmap copy of bf16"]["median"] / load["load of bf16"]["median"],
        "memmap copy / load of FP8": load["memmap copy of FP8"]["median"] / load["load of FP8"]["median"],
    }
    if "safetensors.numpy of bf16" in load:
        ratios["load / safetensors.numpy"] = (
            load["load of bf16"]["median"] / load["safetensors.numpy of bf16"]["median"]
        )
    if "compressed-tensors" in convert:
        ratios["compressed-tensors / convert"] = convert["compressed-tensors"]["median"] / convert["convert"]["median"]
    for name, memory in measured["memory"].items():
        ratios[f"anonymous / tensor bytes of {name}"] = memory["anonymous_bytes"] / memory["tensor_bytes"]
    return ratios
