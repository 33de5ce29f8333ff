"""Size and error of each format on tensors that resemble those of a transformer.

Five random matrices with fixed seeds represent two weights, an activation, a gradient and an embedding. They differ in
the ratio of a block's amax to its typical magnitude, which determines the quantisation error. Each is quantised to
every format of `scaledot.FORMATS`, and to four variants that show how to define a new format: by `dataclasses.replace`
of an existing one.

The error is the signal-to-noise ratio 10 log10(|x|^2 / |x - dequantize(q)|^2) in decibels. It is dominated by large
elements: a tensor with a few large channels can have a high ratio although its small elements became zero. The size is
`q.nbytes`, packed codes and all scales; in memory a code may have a wider dtype, as 6-bit codes are stored in bytes.
Times are those of this machine; times of a CPU say little about an accelerator.

Prints a table and writes `formats.png` to the current directory.
"""

import dataclasses
import math
import statistics
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from tqdm import tqdm

import scaledot as sd

SHAPE = (1024, 4096)
SIZE = math.prod(SHAPE)
CHART = Path("formats.png")

# The Okabe-Ito palette, distinguishable with colour blindness.
COLOURS = ("#0072B2", "#56B4E9", "#D55E00", "#CC79A7", "#009E73")
FAMILIES = ("floats, float32 scales", "floats, 8-bit scales", "integers", "codebook")
HOW_TO_READ = (
    "`bits` are packed bits per element, including scales; SNR is the signal-to-noise ratio: 6 dB more halve the\n"
    "error. Choose the fewest bits whose lowest SNR is acceptable."
)


@dataclasses.dataclass(frozen=True)
class Tensor:
    name: str
    kind: str
    description: str
    x: jax.Array


@dataclasses.dataclass(frozen=True)
class Row:
    """A format with its signal-to-noise ratio for each tensor, total bytes, and time."""

    format: sd.Format
    snr: tuple[float, ...]
    nbytes: int
    ms: float

    @property
    def bits(self) -> float:
        return 8 * self.nbytes / (SIZE * len(self.snr))

    @property
    def of_bf16(self) -> float:
        return self.bits / 16


def make_tensors(rng: np.random.Generator) -> tuple[Tensor, ...]:
    """Random matrices; rows are output channels or tokens, columns the contracting dim of a matmul."""
    attention = 0.02 * rng.standard_normal(SHAPE)
    mlp = 0.02 * rng.standard_normal(SHAPE) * outlier_columns(rng, count=8, low=8, high=16)
    activation = rng.laplace(size=SHAPE) * outlier_columns(rng, count=6, low=30, high=80)
    gradient = 1e-4 * rng.standard_t(df=3, size=SHAPE)
    sizes = rng.lognormal(sigma=0.5, size=(SHAPE[0], 1)) * rng.lognormal(sigma=0.5, size=SHAPE[1])
    embedding = 0.02 * rng.standard_normal(SHAPE) * sizes
    embedding[0] = 0  # the padding token
    return (
        Tensor("attn w", "attention weight", "normal, std 0.02", as_float32(attention)),
        Tensor("mlp w", "MLP weight", "normal, 8 of 4096 channels 8 to 16 times larger", as_float32(mlp)),
        Tensor("act", "activation", "Laplace, 6 of 4096 channels 30 to 80 times larger", as_float32(activation)),
        Tensor("grad", "gradient", "Student-t, 3 degrees of freedom, scale 1e-4", as_float32(gradient)),
        Tensor("embed", "embedding", "normal, rows and columns of log-normal size", as_float32(embedding)),
    )


def outlier_columns(rng: np.random.Generator, count: int, low: float, high: float) -> np.ndarray:
    """A factor per column: 1, but for `count` outliers between `low` and `high`."""
    gain = np.ones(SHAPE[1])
    gain[rng.choice(SHAPE[1], count, replace=False)] = rng.uniform(low, high, count)
    return gain


def as_float32(x: np.ndarray) -> jax.Array:
    return jnp.asarray(x, jnp.float32)


def all_formats() -> tuple[sd.Format, ...]:
    fp8, int4, nvfp4 = (sd.FORMATS[name] for name in ("fp8_e4m3", "int4", "nvfp4"))
    return (
        *sd.FORMATS.values(),
        dataclasses.replace(fp8, name="fp8_e4m3 128", block=(128,)),
        dataclasses.replace(fp8, name="fp8_e4m3 128x128", block=(128, 128)),
        dataclasses.replace(int4, name="int4 128", block=(128,)),
        dataclasses.replace(nvfp4, name="nvfp4 4/6", search="four_over_six"),
    )


def family_of(format: sd.Format) -> str:
    if format.codebook is not None:
        return "codebook"
    if format.is_integer:
        return "integers"
    return "floats, float32 scales" if format.scale == "float32" else "floats, 8-bit scales"


def scale_granularity(format: sd.Format) -> str:
    """The elements that share a scale, as text."""
    if format.block is None:
        return "tensor"
    return "row" if format.block == (0,) else "x".join(map(str, format.block))


quantize = jax.jit(sd.quantize, static_argnums=1)


def measure(format: sd.Format, tensors: tuple[Tensor, ...]) -> Row:
    jax.block_until_ready(quantize(tensors[0].x, format))  # compiles; the other tensors have the same shape
    results, times = zip(*(timed_quantize(t.x, format) for t in tensors), strict=True)
    snr = tuple(snr_db(t.x, sd.dequantize(q)) for t, q in zip(tensors, results, strict=True))
    return Row(format, snr, sum(q.nbytes for q in results), 1e3 * statistics.median(times))


def timed_quantize(x: jax.Array, format: sd.Format) -> tuple[sd.ScaledArray, float]:
    start = time.perf_counter()
    q = jax.block_until_ready(quantize(x, format))
    return q, time.perf_counter() - start


def snr_db(x: jax.Array, y: jax.Array) -> float:
    signal, noise = (np.sum(np.square(a), dtype=np.float64) for a in (np.asarray(x), np.asarray(x - y)))
    return 10 * math.log10(signal / noise)


def by_family(rows: list[Row]) -> Iterator[tuple[str, list[Row]]]:
    """Yields the rows of each family, sorted by bits, then by signal-to-noise ratio, both descending."""
    for family in FAMILIES:
        members = [row for row in rows if family_of(row.format) == family]
        yield family, sorted(members, key=lambda row: (-round(row.bits, 2), -statistics.mean(row.snr)))


def print_table(rows: list[Row], tensors: tuple[Tensor, ...]) -> None:
    print(f"scaledot {sd.__version__} on {jax.devices()[0].device_kind}: {len(tensors)} float32 tensors of {SHAPE}\n")
    for tensor in tensors:
        print(f"  {tensor.name:<8}{tensor.kind}: {tensor.description}")
    names = "".join(f"{tensor.name:>8}" for tensor in tensors)
    head = f"{'format':<18}{'scale per':<10}{'bits':>5} {names}{'size':>11}{'of bf16':>9}{'ms':>7}"
    print(f"\n{'':<34}{'SNR in dB':>{len(names) // 2 + 4}}\n{head}")
    for family, members in by_family(rows):
        print(f"{f'── {family} ':─<{len(head)}}")
        for row in members:
            print(table_line(row))


def table_line(row: Row) -> str:
    snr = "".join(f"{value:8.1f}" for value in row.snr)
    label = f"{row.format.name:<18}{scale_granularity(row.format):<10}{row.bits:5.2f} {snr}"
    return f"{label}{row.nbytes / 2**20:7.2f} MiB{row.of_bf16:9.1%}{row.ms:7.1f}"


def draw(rows: list[Row], tensors: tuple[Tensor, ...]) -> Figure:
    """Bar charts of bits per element and of each tensor's SNR, with formats from top to bottom by family."""
    figure = Figure(figsize=(15, 9.5), layout="constrained")
    bits, *snrs = figure.subplots(1, 1 + len(tensors), sharey=True)
    positions = label_rows(bits, rows)
    draw_bars(bits, {y: row.bits for y, row in positions.items()}, "0.65", "{:.2f}")
    format_axes(bits, "size", "bits per element, packed, with all scales", 1.25 * max(row.bits for row in rows))
    for i, (axes, tensor, colour) in enumerate(zip(snrs, tensors, COLOURS, strict=True)):
        draw_bars(axes, {y: row.snr[i] for y, row in positions.items()}, colour, "{:.1f}")
        format_axes(axes, tensor.kind, tensor.description, 1.25 * max(max(row.snr) for row in rows))
    figure.suptitle("Size of each format, and its accuracy on five tensors", fontsize=18, fontweight="bold")
    figure.supxlabel(caption(), fontsize=11, color="0.3")
    return figure


def label_rows(axes: Axes, rows: list[Row]) -> dict[int, Row]:
    """Labels the y axis with families and formats; returns the rows by y position."""
    labels, positions = [], {}
    for family, members in by_family(rows):
        labels.append(family)
        for row in members:
            positions[len(labels)] = row
            labels.append(row.format.name)
    axes.set_yticks(range(len(labels)), labels=labels, fontsize=11)
    axes.set_ylim(len(labels) - 0.4, -0.5)
    for y, label in enumerate(axes.get_yticklabels()):
        if y not in positions:
            label.set(fontweight="bold", color="0.3")
    return positions


def draw_bars(axes: Axes, values: dict[int, float], colour: str, text: str) -> None:
    bars = axes.barh(list(values), list(values.values()), height=0.72, color=colour)
    axes.bar_label(bars, fmt=text, padding=3, fontsize=9.5, color="0.2")


def format_axes(axes: Axes, title: str, description: str, right: float) -> None:
    axes.set_title(title, fontsize=13, fontweight="bold", loc="left", pad=38)
    below = axes.annotate(textwrap.fill(description, 28), (0, 1), (0, 33), "axes fraction", "offset points")
    below.set(va="top", fontsize=9.5, color="0.3")
    axes.set_xlim(0, right)
    axes.set_xticks([])
    axes.spines[["top", "right", "bottom"]].set_visible(False)
    axes.spines["left"].set_color("0.6")
    axes.tick_params(length=0)


def caption() -> str:
    legend = "Coloured bars: signal-to-noise ratio in dB; longer is better, 6 dB more halve the error."
    return f"{legend}  scaledot {sd.__version__}, float32 tensors of {SHAPE[0]} x {SHAPE[1]}."


def main() -> None:
    tensors = make_tensors(np.random.default_rng(0))
    bar = tqdm(all_formats(), desc="quantising", unit="format", leave=False)
    rows = [measure(format, tensors) for format in bar]
    print_table(rows, tensors)
    draw(rows, tensors).savefig(CHART, dpi=130, bbox_inches="tight", pad_inches=0.3)
    print(f"\nThe same as a chart: {CHART.resolve()}\n{HOW_TO_READ}")


if __name__ == "__main__":
    main()
