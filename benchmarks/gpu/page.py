"""`python -m benchmarks.gpu.page`: the page of docs about speed, and lines of the README, from a device's results.

Everything that is a number comes from the file; the words around it are below.
"""

import json
import textwrap
from typing import Any

from matplotlib.figure import Figure

from benchmarks.gpu import model_page
from benchmarks.gpu.remarks import remark
from benchmarks.record import RESULTS
from benchmarks.table import markdown, verdict

DOCS = RESULTS.parent.parent / "docs"
PAGE, PICTURE = DOCS / "notes" / "performance.md", DOCS / "images" / "performance.png"
MODEL_PICTURE = DOCS / "images" / "whole-models.png"
README, START, END = DOCS.parent / "README.md", "<!-- Made by `python -m benchmarks.gpu.page`. -->\n", "<!-- end -->"
QUOTED = "nvidia-h200.json"

TEXT = """# How fast is it on Hopper?

<!-- Made by `python -m benchmarks.gpu.page`; change that, not this. -->

Measured by `python -m benchmarks.run --suite model`, `dense`, `gemm`, `block`, `grouped`, `decode`, `cast` and
`quantize` on one
{device} with jax {jax}, torch {torch}, torchao {torchao} and flax {flax}, {date}:
[{results}](../../benchmarks/results/{results}).
`--suite targets` runs those cases of `block`, `grouped` and `decode` that have a target, in some minutes, and prints a
table of what they reached, with that of whole models as last measured.
Sides of a case run in one process and take turns of about a tenth of a second in an order that changes, on N(0, 1)
data. The chip seems limited by power: whole runs differ by some hundredths from machine to machine, and sides by as
much with what ran before them.

## Whole models

A Llama-like stack in linen (`benchmarks/gpu/llama.py`): blocks of width 4096 and 14336 hidden features, embedding and
head of 32000, 4 × 2048 tokens, float32 parameters, bfloat16 computation, AdamW; jax {model_jax} and flax {model_flax},
{model_date}. Every row is a process of its own. The first step is tracing + lowering + compiling + running; kernels are
traced and lowered once, so that further blocks add to compiling. *Beyond bfloat16* is against the first step of the
bfloat16 row, and *for activations* is peak memory less float32 parameters, gradients and two moments. Rows of NNX start
from the parameters of linen.{same_losses} Rows of torch have other random parameters; they are compared with torch's
own bfloat16, and their first step is not taken apart. *Second process* runs the same program again with JAX's
persistent compilation cache. Scanned stacks are named by the `jax.checkpoint` policy of their blocks; scaledot's own
policies are compared with bfloat16 under `checkpoint_dots`.

![Speed of steps over bfloat16, and first steps](../images/whole-models.png)

{model}

Targets of whole models:

{model_targets}

## A linear layer, forward and backward

loss = vdot(x w, dy), gradients for x (bfloat16) and the float32 kernel w. Ratios are to JAX in bfloat16, of what goes
through Flax to Flax's own bfloat16 layer. *First step* is tracing, compiling and one step, at most 10 s by our own
target; the casts of NVFP4 are the longest programs to compile. *Memory* is results and temporaries.

![Steps per second over JAX's bfloat16](../images/performance.png)

{dense}

MXFP8 and NVFP4 are multiplied as exact bfloat16 values, so the product is bfloat16's; what they lose or gain is in the
casts, and in a small layer in launches.

## The FP8 product

{gemm}

Tensor cores add 8-bit products with few bits. *Error* is of float32 results against float64, relative. The
default adds all of K there; `precision="highest"` moves the sums into float32 every 128 terms.

## Scales for 128 terms

Lines of 128 on one side and squares of 128 × 128 on the other (forward, and the gradient of the input), or lines on
both (the gradient of the kernel). Sums of every 128 terms are scaled and added in float32. Products of fp8 are beside
torch's, those of int8 beside ours of fp8.

{block}

## Experts

{tokens} tokens in {experts} uneven groups, {inputs} → {outputs}. *Of dense* is against our own product of as many
tokens with one matrix, *of lax* against `lax.ragged_dot` in bfloat16, which multiplies all tokens by every matrix. The
gradient of the kernels writes {experts} float32 matrices where the dense one writes one. A *step* is result and both
gradients, casts included.

{grouped}

## Decoding

A few rows of bfloat16 times packed weights; times are of one layer. A step is a loop over tokens, each of which meets
several layers, more bytes than the cache holds. *GB/s* counts codes and scales.

{decode}

## Casts

One pass reads a matrix and writes what both of its products take. Every byte is counted once; *of copy* is against a
copy on the device in the same run. *Codes* are codes and scales, *values* the bfloat16 numbers that they stand for.

{cast}

Codes and scales were the reference's, byte for byte, before anything was timed.

`sd.quantize` of {rows} × {columns} bfloat16 (`--suite quantize`), in parts of the rate of the kernel that it takes. An
eager call is also Python, which runs while the cast before is on the GPU.

{quantize}
"""


def write() -> None:
    results = json.loads((RESULTS / QUOTED).read_text())
    PICTURE.parent.mkdir(exist_ok=True)
    picture(results).savefig(PICTURE, dpi=150)
    model_page.picture(results).savefig(MODEL_PICTURE, dpi=150)
    PAGE.write_text(text(results))
    README.write_text(readme(README.read_text(), results))
    written = (PAGE, PICTURE, MODEL_PICTURE, README)
    print(f"wrote {', '.join(str(path.relative_to(DOCS.parent)) for path in written)}")


def readme(words: str, results: dict[str, Any]) -> str:
    """The README with its lines about whole models made anew."""
    before, rest = words.split(START)
    _, after = rest.split(END, 1)
    path = (RESULTS / QUOTED).relative_to(DOCS.parent).as_posix()
    return f"{before}{START}\n{model_page.readme(results, path)}\n\n{END}{after}"


def text(results: dict[str, Any]) -> str:
    about = results["dense"]["cases"][0]["environment"]
    words = {name: about[name] for name in ("device", "jax", "torch", "torchao", "flax")}
    dense = "\n\n".join(_dense("dense", case) for case in results["dense"]["cases"])
    tables = {"dense": dense, "gemm": _gemm(results["gemm"]), "cast": _cast(results["cast"])}
    tables |= {"block": _block(results["block"]), "grouped": _grouped(results["grouped"])}
    tables |= {"decode": _decode(results["decode"]), "quantize": _quantize(results["quantize"])}
    tables |= {"model": model_page.table(results), "model_targets": model_page.targets(results)}
    tables |= {"same_losses": model_page.same_losses(results)}
    of_model = results["model"]["cases"][0]["environment"]
    words |= {f"model_{name}": of_model[name] for name in ("jax", "flax")} | {"model_date": of_model["date"][:10]}
    first = results["grouped"]["cases"][0]
    words |= {"tokens": sum(first["groups"]), "experts": len(first["groups"])}
    words |= {"inputs": first["inputs"], "outputs": first["outputs"]}
    words |= dict(zip(("rows", "columns"), results["quantize"]["shape"], strict=True))
    return TEXT.format(**words, **tables, date=about["date"][:10], results=QUOTED)


def _dense(suite: str, case: dict[str, Any]) -> str:
    title = f"**{case['case']}**: {case['batch']} × {case['sequence']} tokens, {case['inputs']} → {case['outputs']}"
    rows = []
    for name, side in sorted(case["sides"].items(), key=lambda item: item[1]["median_ms"]):
        memory = "" if side["memory_gb"] is None else f"{side['memory_gb']:.2f} GB"
        late = name.startswith("scaledot") and side["first_step_s"] > case["first_step_target_s"]
        first = f"{side['first_step_s']:.1f} s" + (f" (over {case['first_step_target_s']} s)" if late else "")
        target = _target(side["target"], side["ratio"])
        rows.append((name, f"{side['median_ms']:.2f}", f"{side['ratio']:.2f} ×", target, first, memory))
    table = markdown(("program", "ms", "ratio", "target", "first step", "memory"), rows)
    return f"{title}\n\n{table}{_remarks(suite, [case], 'ratio')}"


def _gemm(suite: dict[str, Any]) -> str:
    rows = []
    for case in suite["cases"]:
        for name, side in sorted(case["sides"].items(), key=lambda item: -item[1]["tflops"]):
            error = case["errors"].get(name.removeprefix("scaledot "))
            part = "" if side["of_torch"] is None else f"{side['of_torch']:.2f}"
            sizes = f"{case['m']} × {case['n']} × {case['k']}"
            target = _target(side["target"], side["of_torch"])
            rows.append((sizes, name, f"{side['tflops']:.0f}", part, target, "" if error is None else f"{error:.1e}"))
    return markdown(("M × N × K", "program", "TFLOP/s", "of torch, fast", "target", "error"), rows)


def _block(suite: dict[str, Any]) -> str:
    products, steps = [], []
    for case in suite["cases"]:
        if "batch" in case:
            steps.append(_dense("block", case))
            continue
        for name, side in case["sides"].items():
            error = case["errors"].get(f"{name}, K = {case['k']}")
            part = "" if side["of_peer"] is None else f"{side['of_peer']:.2f}"
            target = _target(side["target"], side["of_peer"])
            off = "" if error is None else f"{error:.1e}"
            products.append((f"{case['case']}, {case['k']}", name, f"{side['tflops']:.0f}", part, target, off))
    table = markdown(("blocks, M = N = K", "program", "TFLOP/s", "of the peer", "target", "error"), products)
    remarks = _remarks("block", [case for case in suite["cases"] if "batch" not in case], "of_peer")
    return "\n\n".join([table + remarks, *steps])


def _grouped(suite: dict[str, Any]) -> str:
    rows = []
    for case in suite["cases"]:
        off = case["errors"].get(f"scaledot, K = {case['inputs']}")
        for name, side in case["sides"].items():
            ratios = ["" if side.get(key) is None else f"{side[key]:.2f}" for key in ("of_dense", "of_lax")]
            targets = ", ".join(_target(target, side.get(key)) for key, target in side["targets"].items())
            error = "" if off is None or name != "scaledot" else f"{off:.1e}"
            rows.append(
                (case["case"], name, f"{side['median_ms']:.2f}", f"{side['tflops']:.0f}", *ratios, targets, error)
            )
    return markdown(("product", "program", "ms", "TFLOP/s", "of dense", "of lax", "target", "error"), rows)


def _decode(suite: dict[str, Any]) -> str:
    rows = []
    for case in suite["cases"]:
        terms = case["case"].split()[0]
        for name, side in case["sides"].items():
            found = case["errors"].get(name, {})
            off = [f"{found[key]:.1e}" for who in ("scaledot", "XLA") if (key := f"{who}, {terms} terms") in found]
            ratio = "" if side["of_bf16"] is None else f"{side['of_bf16']:.2f}"
            speed = f"{1e3 * side['layer_ms']:.1f}", f"{side['gb_s']:.0f}", ratio
            rows.append((case["case"], name, *speed, _target(side["target"], side["of_bf16"]), " / ".join(off)))
    titles = "layer", "program", "µs", "GB/s", "over bfloat16", "target", "error, ours / XLA's"
    return markdown(titles, rows) + _remarks("decode", suite["cases"], "of_bf16")


def _remarks(suite: str, cases: list[dict[str, Any]], measure: str) -> str:
    """What limits the rows that missed their targets, each said once."""
    found: dict[str, list[str]] = {}
    for case in cases:
        for name, side in case["sides"].items():
            words = remark(suite, case["case"], name, side["target"], side[measure])
            if words:
                found.setdefault(words, []).append(name if len(cases) == 1 else case["case"])
    lines = [f"*{'; '.join(names)}*: {words}" for words, names in found.items()]
    return "".join(f"\n\n{textwrap.fill(line, 120)}" for line in lines)


def _cast(suite: dict[str, Any]) -> str:
    rows = []
    for case in suite["cases"]:
        ours, theirs = case["sides"]["scaledot"], case["sides"].get("XLA")
        rows.append(
            (
                case["case"],
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
        for name, side in case["sides"].items():
            target = _target(case["target"], side["of_kernel"]) if name.startswith("sd.quantize") else ""
            what = case["case"].removeprefix("quantize ")
            rows.append((what, name, f"{1e3 * side['median_ms']:.0f}", f"{side['of_kernel']:.0%}", target))
    return markdown(("cast", "program", "µs", "of kernel", "target"), rows)


def _target(target: float | None, reached: float | None) -> str:
    return "" if target is None or reached is None else f"{target:g} {verdict(reached >= target)}"


def picture(results: dict[str, Any]) -> Figure:
    """Bars of the ratio to bfloat16, ours in colour."""
    cases = results["dense"]["cases"]
    figure = Figure(figsize=(9, 0.34 * sum(len(case["sides"]) + 2 for case in cases)), layout="constrained")
    heights = [len(case["sides"]) + 1 for case in cases]
    axes = figure.subplots(len(cases), 1, sharex=True, squeeze=False, height_ratios=heights)[:, 0]
    for axis, case in zip(axes, cases, strict=True):
        sides = sorted(case["sides"].items(), key=lambda item: item[1]["ratio"])
        names, ratios = [name for name, _ in sides], [side["ratio"] for _, side in sides]
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
    axes[-1].set_xlabel("speed of a step over bfloat16")
    return figure


if __name__ == "__main__":
    write()
