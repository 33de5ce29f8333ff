"""`python -m benchmarks.gpu.page`: generates docs/notes/performance.md, its charts and the README's section on speed.

All numbers come from the results file of a device; the text around them is below. No GPU is needed.
"""

import textwrap
from typing import Any

from matplotlib.figure import Figure

from benchmarks.gpu import model_page, report
from benchmarks.gpu.remarks import remark
from benchmarks.record import RESULTS
from benchmarks.table import markdown, verdict

DOCS = RESULTS.parent.parent / "docs"
PAGE, FIGURE = DOCS / "notes" / "performance.md", DOCS / "images" / "performance.png"
MODEL_FIGURE = DOCS / "images" / "whole-models.png"
README, START, END = DOCS.parent / "README.md", "<!-- Made by `python -m benchmarks.gpu.page`. -->\n", "<!-- end -->"
RESULTS_FILE = RESULTS / "nvidia-h200.json"

TEXT = """# How fast is it on Hopper?

<!-- Made by `python -m benchmarks.gpu.page`; change that, not this. -->

Measured by `python -m benchmarks.run --suite model`, `dense`, `gemm`, `block`, `grouped`, `decode`, `cast` and
`quantize` on one
{device} with jax {jax}, torch {torch}, torchao {torchao} and flax {flax}, {date}:
[{results}](../../benchmarks/results/{results}).
`--suite targets` runs the cases of `block`, `grouped` and `decode` that have a target, in some minutes, and prints a
table of what they reached, with the latest results of whole models.
Implementations of a case run alternately in one process, about 0.12 s at a time in shuffled order, on N(0, 1) data. The
chip appears to be power-limited: runs differ by some percent between machines, and implementations by as much depending
on what ran before.

## Whole models

A Llama-like decoder in linen (`benchmarks/gpu/llama.py`): decoder blocks of width 4096 with 14336 hidden features, a
vocabulary of 32000, 4 × 2048 tokens, float32 parameters, bfloat16 computation, AdamW; jax {model_jax} and flax
{model_flax}, {model_date}. Each row ran in its own process. The first step is tracing + lowering + compilation +
execution; each kernel is traced and lowered once, so further decoder blocks add mostly compile time. *Beyond bfloat16*
is relative to the first step of the bfloat16 row, and *activations* are peak memory less float32 parameters, gradients
and two moments. NNX models start from linen's parameters.{same_losses} torch models have other random
parameters; their baseline is torch's own bfloat16, and their first step is a total. *Second process* runs the same
program again with JAX's persistent compilation cache. Scanned models are named by the `jax.checkpoint` policy of their
decoder blocks; the baseline of scaledot's own policies is bfloat16 under `checkpoint_dots`. *Head too*: the LM head in
fp8 as well.

![Speedups over bfloat16, and first steps](../images/whole-models.png)

{model}

Targets of whole models:

{model_targets}

## A linear layer, forward and backward

loss = vdot(x w, dy), with gradients of x (bfloat16) and of the float32 weight w. *Speedup* is over bfloat16 in JAX, and
for layers in Flax over Flax's own bfloat16 layer. *First step* is tracing, compilation and one step, with a target of
10 s for scaledot; the NVFP4 casts take longest to compile. *Memory* is results and temporaries.

![Speedups over JAX in bfloat16](../images/performance.png)

{dense}

On Hopper, MXFP8 and NVFP4 operands are dequantised exactly to bfloat16, so their matmuls run at about bfloat16's rate;
the difference to bfloat16 is the time of casts, and in a small layer of kernel launches.

## FP8 matmul with per-tensor scales

{gemm}

Hopper's tensor cores accumulate FP8 products with reduced precision. *Error* is that of float32 results relative to
float64. By default the tensor cores accumulate all of K (*fast accumulation*, torch's `use_fast_accum=True`);
`precision="highest"` promotes partial accumulators to float32 every 128 elements of K (*promoted*).

## Matmuls with scales per 128 elements

1×128 blocks on one operand and 128×128 blocks on the other (fwd and dgrad), or 1×128 on both (wgrad). Partial
accumulators of 128 elements along K are scaled and added in float32. The baseline of fp8 matmuls is torch, that of int8
matmuls is scaledot's fp8.

{block}

## Experts

{tokens} tokens in {experts} uneven groups, {inputs} → {outputs}. *Of dense* is the rate relative to scaledot's dense
matmul of as many tokens with one matrix, *of lax* relative to `lax.ragged_dot` in bfloat16, which XLA lowers to a dense
GEMM of all tokens and all groups, with a mask. wgrad writes {experts} float32 matrices, the dense one a single matrix.
A *step* is the result and both gradients, including casts.

{grouped}

## Decoding

A few rows of bfloat16 times packed weights; times are per layer. The timed loop cycles through enough layers that
weights exceed L2 and come from HBM. *GB/s* counts codes and scales.

{decode}

## Casts

One kernel (plus an amax pass for current scaling and NVFP4) reads a matrix and writes the operands of both of its
matmuls. Bytes read and written are counted once; *of copy* is the bandwidth relative to a device-to-device copy in the
same run. *Codes* are stored with scales; *dequantised* results are bfloat16 values of the codes. In delayed scaling,
the quantisation multiplier is an input.

{cast}

Codes and scales were compared with the reference, byte for byte, before timing.

`sd.quantize` of {rows} × {columns} bfloat16 (`--suite quantize`), relative to the rate of the kernel that it selects.
An eager call includes Python's dispatch, which overlaps with the previous cast on the GPU.

{quantize}
"""
# Names of cases and implementations are keys of the results; these phrases of them are displayed in other words.
DISPLAYED = {
    "scaledot fast (default)": "scaledot, fast accumulation (default)",
    "scaledot promoted": "scaledot, promoted",
    "torch._scaled_mm, fast": "torch._scaled_mm, use_fast_accum=True",
    "torch._scaled_mm, promoted": "torch._scaled_mm, use_fast_accum=False",
    "gradient of kernels": "wgrad",
    "mxfp8, both orientations": "mxfp8, 1×32 and 32×1",
    "nvfp4, both orientations": "nvfp4, 1×16 and 16×1",
    "rotated lines along rows, lines down columns": "rotated 1×128, 128×1",
    "rotated lines down columns, lines along rows": "rotated 128×1, 1×128",
    "rotated lines of 128": "rotated 1×128",
    "lines of 128 in both orientations": "1×128 and 128×1",
    "squares of 128 in both layouts": "128×128, row-major + transposed",
    "both layouts": "row-major + transposed",
    "lines of 128": "1×128",
    "squares of 128": "128×128",
    "given factor": "delayed scaling",
    "rows in groups": "row groups",
    "in squares": "in square blocks",
    "nvfp4 x: values, rotated codes": "nvfp4 x: row-wise dequantised; column-wise Hadamard-rotated codes",
    "nvfp4 g: stochastic, values, rotated values": (
        "nvfp4 g: stochastic; row-wise dequantised; column-wise Hadamard-rotated and dequantised"
    ),
    "nvfp4 w: lines": "nvfp4 w: 1×16",
    "values": "dequantised",
    "one scale each": "one scale per group",
    "one scale": "per tensor",
}


def write() -> None:
    results = report.read(RESULTS_FILE)
    FIGURE.parent.mkdir(exist_ok=True)
    figure_of(results).savefig(FIGURE, dpi=150)
    model_page.figure_of(results).savefig(MODEL_FIGURE, dpi=150)
    PAGE.write_text(text(results))
    README.write_text(readme(README.read_text(), results))
    written = (PAGE, FIGURE, MODEL_FIGURE, README)
    print(f"wrote {', '.join(str(path.relative_to(DOCS.parent)) for path in written)}")


def readme(current: str, results: dict[str, Any]) -> str:
    """Returns the README with its section on whole models regenerated."""
    before, rest = current.split(START)
    _, after = rest.split(END, 1)
    path = RESULTS_FILE.relative_to(DOCS.parent).as_posix()
    return f"{before}{START}\n{model_page.readme(results, path)}\n\n{END}{after}"


def text(results: dict[str, Any]) -> str:
    environment = results["dense"]["cases"][0]["environment"]
    fields = {name: environment[name] for name in ("device", "jax", "torch", "torchao", "flax")}
    dense = "\n\n".join(_dense("dense", case) for case in results["dense"]["cases"])
    tables = {"dense": dense, "gemm": _gemm(results["gemm"]), "cast": _cast(results["cast"])}
    tables |= {"block": _block(results["block"]), "grouped": _grouped(results["grouped"])}
    tables |= {"decode": _decode(results["decode"]), "quantize": _quantize(results["quantize"])}
    tables |= {"model": model_page.table(results), "model_targets": model_page.targets(results)}
    tables |= {"same_losses": model_page.same_losses(results)}
    of_model = results["model"]["cases"][0]["environment"]
    fields |= {f"model_{name}": of_model[name] for name in ("jax", "flax")} | {"model_date": of_model["date"][:10]}
    grouped = results["grouped"]["cases"][0]
    fields |= {"tokens": sum(grouped["groups"]), "experts": len(grouped["groups"])}
    fields |= {"inputs": grouped["inputs"], "outputs": grouped["outputs"]}
    fields |= dict(zip(("rows", "columns"), results["quantize"]["shape"], strict=True))
    return TEXT.format(**fields, **tables, date=environment["date"][:10], results=RESULTS_FILE.name)


def _displayed(case: str) -> str:
    for phrase, display in DISPLAYED.items():
        case = case.replace(phrase, display)
    return case


def _dense(suite: str, case: dict[str, Any]) -> str:
    title = f"**{case['case']}**: {case['batch']} × {case['sequence']} tokens, {case['inputs']} → {case['outputs']}"
    rows = []
    for name, result in sorted(case["implementations"].items(), key=lambda item: item[1]["median_ms"]):
        memory = "" if result["memory_gb"] is None else f"{result['memory_gb']:.2f} GB"
        missed = name.startswith("scaledot") and result["first_step_s"] > case["first_step_target_s"]
        first = f"{result['first_step_s']:.1f} s" + (f" (over {case['first_step_target_s']} s)" if missed else "")
        target = _target(result["target"], result["ratio"])
        rows.append((name, f"{result['median_ms']:.2f}", f"{result['ratio']:.2f} ×", target, first, memory))
    table = markdown(("implementation", "ms", "speedup", "target", "first step", "memory"), rows)
    return f"{title}\n\n{table}{_remarks(suite, [case], 'ratio')}"


def _gemm(suite: dict[str, Any]) -> str:
    rows = []
    for case in suite["cases"]:
        for name, result in sorted(case["implementations"].items(), key=lambda item: -item[1]["tflops"]):
            error = case["errors"].get(name.removeprefix("scaledot "))
            relative = "" if result["of_torch"] is None else f"{result['of_torch']:.2f}"
            sizes = f"{case['m']} × {case['n']} × {case['k']}"
            target = _target(result["target"], result["of_torch"])
            rows.append(
                (
                    sizes,
                    _displayed(name),
                    f"{result['tflops']:.0f}",
                    relative,
                    target,
                    "" if error is None else f"{error:.1e}",
                )
            )
    titles = "M × N × K", "implementation", "TFLOP/s", "of torch, fast accumulation", "target", "error"
    return markdown(titles, rows)


def _block(suite: dict[str, Any]) -> str:
    matmuls, steps = [], []
    for case in suite["cases"]:
        if "batch" in case:
            steps.append(_dense("block", case))
            continue
        for name, result in case["implementations"].items():
            error = case["errors"].get(f"{name}, K = {case['k']}")
            relative = "" if result["of_baseline"] is None else f"{result['of_baseline']:.2f}"
            target = _target(result["target"], result["of_baseline"])
            shown = "" if error is None else f"{error:.1e}"
            matmuls.append((f"{case['case']}, {case['k']}", name, f"{result['tflops']:.0f}", relative, target, shown))
    table = markdown(("blocks, M = N = K", "implementation", "TFLOP/s", "of baseline", "target", "error"), matmuls)
    remarks = _remarks("block", [case for case in suite["cases"] if "batch" not in case], "of_baseline")
    return "\n\n".join([table + remarks, *steps])


def _grouped(suite: dict[str, Any]) -> str:
    rows = []
    for case in suite["cases"]:
        relative_error = case["errors"].get(f"scaledot, K = {case['inputs']}")
        for name, result in case["implementations"].items():
            ratios = ["" if result.get(key) is None else f"{result[key]:.2f}" for key in ("of_dense", "of_lax")]
            targets = ", ".join(_target(target, result.get(key)) for key, target in result["targets"].items())
            error = "" if relative_error is None or name != "scaledot" else f"{relative_error:.1e}"
            speed = f"{result['median_ms']:.2f}", f"{result['tflops']:.0f}"
            rows.append((_displayed(case["case"]), name, *speed, *ratios, targets, error))
    return markdown(("matmul", "implementation", "ms", "TFLOP/s", "of dense", "of lax", "target", "error"), rows)


def _decode(suite: dict[str, Any]) -> str:
    rows = []
    for case in suite["cases"]:
        k = case["case"].split()[0]
        for name, result in case["implementations"].items():
            errors = case["errors"].get(name, {})
            shown = [f"{errors[key]:.1e}" for of in ("scaledot", "XLA") if (key := f"{of}, K = {k}") in errors]
            ratio = "" if result["of_bf16"] is None else f"{result['of_bf16']:.2f}"
            speed = f"{1e3 * result['layer_ms']:.1f}", f"{result['gb_s']:.0f}", ratio
            rows.append((case["case"], name, *speed, _target(result["target"], result["of_bf16"]), " / ".join(shown)))
    titles = "layer", "implementation", "µs", "GB/s", "speedup over bfloat16", "target", "error, scaledot / XLA"
    return markdown(titles, rows) + _remarks("decode", suite["cases"], "of_bf16")


def _remarks(suite: str, cases: list[dict[str, Any]], measure: str) -> str:
    """The remarks on implementations that missed their targets, each once."""
    missed: dict[str, list[str]] = {}
    for case in cases:
        for name, result in case["implementations"].items():
            text = remark(suite, case["case"], name, result["target"], result[measure])
            if text:
                missed.setdefault(text, []).append(name if len(cases) == 1 else case["case"])
    lines = [f"*{'; '.join(names)}*: {text}" for text, names in missed.items()]
    return "".join(f"\n\n{textwrap.fill(line, 120)}" for line in lines)


def _cast(suite: dict[str, Any]) -> str:
    rows = []
    for case in suite["cases"]:
        ours, theirs = case["implementations"]["scaledot"], case["implementations"].get("XLA")
        rows.append(
            (
                _displayed(case["case"]),
                case["dtype"],
                f"{ours['gbs']:.0f}",
                f"{ours['of_copy']:.0%}",
                _target(case["target"], ours["of_copy"]),
                "" if theirs is None else f"{theirs['of_copy']:.0%}",
            )
        )
    return markdown(("cast", "from", "GB/s", "of copy", "target", "XLA, of copy"), rows)


def _quantize(suite: dict[str, Any]) -> str:
    rows = []
    for case in suite["cases"]:
        for name, result in case["implementations"].items():
            target = _target(case["target"], result["of_kernel"]) if name.startswith("sd.quantize") else ""
            cast = _displayed(case["case"].removeprefix("quantize "))
            rows.append((cast, name, f"{1e3 * result['median_ms']:.0f}", f"{result['of_kernel']:.0%}", target))
    return markdown(("cast", "implementation", "µs", "of kernel", "target"), rows)


def _target(target: float | None, measured: float | None) -> str:
    return "" if target is None or measured is None else f"{target:g} {verdict(measured >= target)}"


def figure_of(results: dict[str, Any]) -> Figure:
    """A bar chart of speedups over bfloat16, scaledot's in colour."""
    cases = results["dense"]["cases"]
    figure = Figure(figsize=(9, 0.34 * sum(len(case["implementations"]) + 2 for case in cases)), layout="constrained")
    heights = [len(case["implementations"]) + 1 for case in cases]
    axes = figure.subplots(len(cases), 1, sharex=True, squeeze=False, height_ratios=heights)[:, 0]
    for axis, case in zip(axes, cases, strict=True):
        ordered = sorted(case["implementations"].items(), key=lambda item: item[1]["ratio"])
        names, ratios = [name for name, _ in ordered], [result["ratio"] for _, result in ordered]
        colours = ["tab:blue" if name.startswith("scaledot") else "0.7" for name in names]
        bars = axis.barh(names, ratios, color=colours)
        white = {"facecolor": "white", "edgecolor": "none", "pad": 0.5}
        axis.bar_label(bars, [f"{ratio:.2f}" for ratio in ratios], padding=4, fontsize=8, bbox=white)
        axis.axvline(1, color="black", linewidth=0.8, zorder=0.5)
        axis.set_title(
            f"{case['batch']} × {case['sequence']} tokens, {case['inputs']} → {case['outputs']}", fontsize=10
        )
        axis.tick_params(axis="y", labelsize=8)
        axis.spines[["top", "right"]].set_visible(False)
    axes[-1].set_xlabel("speedup of a step over bfloat16")
    return figure


if __name__ == "__main__":
    write()
