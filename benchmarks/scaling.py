"""`python -m benchmarks.scaling`: plans of large models on many devices, and the page of docs about them.

Plans are those of `scaledot plan`: layers are compiled and counted, nothing is run. `--page` makes the page
again from the results that are there. Everything that is a number comes from the file; the words around it are below.
"""

import argparse
import json
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks import record
from scaledot.cli import main as scaledot
from scaledot.plan.cost import of_operands

CASES = (
    "--model llama3-8b --devices 64 --sequence-parallel",
    "--model llama3-70b --devices 1024 --sequence-parallel",
    "--model llama3-405b --devices 10240 --sequence-parallel",
    "--model llama3-405b --devices 10240 --sequence-parallel --device b200",
    "--model llama3-405b --mesh dp=160,fsdp=8,tp=8 --sequence-parallel --device gb200",
)
PAGE = record.RESULTS.parent.parent / "docs" / "notes" / "scaling.md"
QUOTED = "scaling-jax0.12.0.1.json"
SHOWN = 2  # the plan whose bytes are shown along each axis

TEXT = """# Past one host

<!-- Made by `python -m benchmarks.scaling`; change that, not this. -->

What does low precision gain where a model is split over thousands of devices? Nobody here has them, so this is a
**model**, not a measurement: the collectives are those of programs that XLA compiled for the mesh, and times follow
from a table of rates, some measured and some assumed. Made with jax {jax}, {date}:
[{results}](../../benchmarks/results/{results}).

```
scaledot plan --model llama3-405b --devices 10240 --sequence-parallel
scaledot plan --model mine.json --mesh dp=4,fsdp=8,tp=8 --recipes fp8_block nvfp4 --json plan.json
```

## How

* **Programs.** A decoder layer's four linear products, forward and backward as in a step of many layers, under
  `train.einsum` on explicit mesh axes: weights split over fsdp and tp (first products of a pair by columns, second
  ones by rows), tokens over dp and fsdp, and between products over tp where sequences are parallel. XLA compiles them
  for that many CPU devices from shapes alone, in a child process. bfloat16 is the same program with a recipe that
  casts nothing. The head is bfloat16 in all of them.
* **Bytes.** Collectives, their dtypes, sizes and groups are read from the compiled text, and groups turned into mesh
  axes. bfloat16 travels as `u16` and codes as `u8`. A device sends (n − 1)/n of what is gathered or scattered among
  n, twice that of what is added up, and all of what is passed on. Tests hold the bytes to closed forms on meshes of
  eight devices.
* **Many devices.** Devices along dp only repeat each other: beyond 2048 devices the mesh is compiled with two of
  them, the tokens of each unchanged, and the formulas take the true number. A test compiles both.
* **Time.** Operations over the rate of the product's kind; bytes of casts and of Adam over the memory's rate; bytes
  sent over NVLink's rate where a group's devices are neighbours within its reach, over the network's where they are
  not, and a latency for each collective. *In turns* adds everything up. *At once* is perfect overlap, the longest of
  computing, NVLink and network. The truth lies between.
* **Memory.** float32 weights, gradients and two moments, split over fsdp and tp; what the backward pass needs, from
  the types of what `train` keeps (codes under a recipe); one layer's gathered weights. Where a step does not fit,
  the nearest mesh of as many devices that does is proposed, or the fewest devices.

## Plans

*Gathered* is what recipes change, operands; *sent* counts sums as well, which stay float32. Times are milliseconds of
a step, *faster* is beside bfloat16.

{plans}

## Where the bytes go

{shown}, gigabytes that a device sends in a step:

{bytes}

## What limits, and what codes gain

* In the plan above gathers shrink to {eight} of bfloat16 with 8-bit codes and to {four} with nvfp4; those of weights
  alone to {fp8_weights} (fp8_block) and {nvfp4_weights} (nvfp4), scales counted. Recipes whose blocks run along what
  is summed gather tokens in two orientations, one for each gradient, which gives some of it back.
* Sums do not shrink: {sums} of what a bfloat16 device sends are float32 parts of sums, over the network those of
  gradients of weights. They bound what smaller codes can save. Sums of 16 bits, or of codes, are not offered:
  gradients would be rounded once for each device.
* Where groups of fsdp reach past NVLink, the network takes longest, and codes gain what they save there. One sequence
  for a group of tp devices is too little work to hide weights that travel twice and gradients that travel once. More
  tokens (`--batch`) would hide more, as far as memory goes; pipelines, which are left out here, would move fewer
  weights; a larger reach of NVLink leaves the network only the sums along dp.
* Scales of whole tensors cost a collective for each cast (`fp8_current`, and `nvfp4`'s second level), of a few bytes
  each: at the assumed latencies {latency} ms of the plan above. Recipes of blocks have none, and `amax_scope="local"`
  leaves out those that are not needed.
* On Hopper MXFP8 and NVFP4 are multiplied as bfloat16 values, so their gain is in bytes and memory only; on Blackwell
  their products are faster too, at rates that are assumed here.

## Rates

TFLOP/s of products and GB/s, as reached. Products, casts and memory of the H200 were measured; attention, links and
latencies, and what other devices reach of their data sheets, are assumed. Every figure says where it is from in
[devices/](../../scaledot/plan/devices).

{rates}

## What is left out

Pipelines, experts and context parallelism; overlap other than none and perfect; norms, activations, rotary embeddings
and the loss; the embedding's lookup and its gradient; recomputation; attention's own collectives, which there are
none of as long as heads are whole; gradient accumulation (plan a step of it, and count sums along dp once). Links are
not shared with anybody, networks do not congest, and a hierarchical collective would send less over the network than
a group's ring where several of its devices are neighbours. Devices never fail.
"""


def plans() -> dict[str, Any]:
    """The record: every case as the command wrote it."""
    found = []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "plan.json"
        for words in CASES:
            if scaledot(["plan", *words.split(), "--json", str(path)]):
                raise SystemExit(1)
            found.append({"arguments": words} | json.loads(path.read_text()))
    return {"environment": record.environment(), "plans": found}


def text(results: dict[str, Any]) -> str:
    environment, found = results["environment"], results["plans"]
    shown = found[SHOWN]["recipes"]
    sums = 1 - _sent(_operands(shown["bf16"])) / _sent(shown["bf16"]["traffic"])
    small = [row for row in shown["fp8_current"]["traffic"] if row["sent_bytes"] < 1e6]
    return TEXT.format(
        jax=environment["jax"],
        date=environment["date"][:10],
        results=QUOTED,
        plans="\n\n".join(map(_plan, found)),
        shown=_title(found[SHOWN]),
        bytes=_bytes(shown),
        eight=", ".join(f"{_share(shown, name)} ({name})" for name in ("fp8_current", "fp8_block", "mxfp8")),
        four=_share(shown, "nvfp4"),
        fp8_weights=_weights(shown, "fp8_block"),
        nvfp4_weights=_weights(shown, "nvfp4"),
        sums=f"{sums:.0%}",
        latency=f"{sum(row['ms'] for row in small):.0f}",
        rates=_rates({plan["rates"]["name"]: plan["rates"] for plan in found}),
    )


def _title(plan: dict[str, Any]) -> str:
    mesh = ", ".join(f"{axis} {size}" for axis, size in plan["mesh"].items())
    return f"{plan['model']['name']} on {_devices(plan['mesh'])} × {plan['rates']['device']} ({mesh})"


def _devices(mesh: dict[str, int]) -> int:
    return mesh["dp"] * mesh["fsdp"] * mesh["tp"]


def _plan(plan: dict[str, Any]) -> str:
    base, rows = plan["recipes"]["bf16"], []
    for name, of in plan["recipes"].items():
        gathered, step = _sent(_operands(of)), of["step_ms"]
        links = [sum(row["ms"] for row in of["traffic"] if row["link"] == link) for link in ("nvlink", "network")]
        rows.append(
            (
                name,
                f"{gathered / 1e9:.1f}",
                _share(plan["recipes"], name),
                f"{_sent(of['traffic']) / 1e9:.1f}",
                f"{sum(of['work_ms'].values()):.0f}",
                *(f"{ms:.0f}" for ms in links),
                f"{step['in_turns']:.0f}",
                f"{base['step_ms']['in_turns'] / step['in_turns']:.2f} ×",
                f"{step['at_once']:.0f} ({step['limit']})",
                f"{base['step_ms']['at_once'] / step['at_once']:.2f} ×",
                f"{sum(of['memory_bytes'].values()) / 1e9:.0f} of {plan['rates']['memory']['gb']:g}",
            )
        )
    titles = ("recipe", "GB gathered", "of bf16", "GB sent", "computing", "NVLink", "network")
    titles += ("in turns", "faster", "at once", "faster", "GB of memory")
    compiled = "" if plan["compiled_mesh"] == plan["mesh"] else f", compiled for {_devices(plan['compiled_mesh'])}"
    tokens = f"{plan['batch']} × {plan['sequence']} tokens for {plan['mesh']['tp']} devices"
    return f"**{_title(plan)}**, {tokens}{compiled}: `{plan['arguments']}`\n\n{_table(titles, rows)}"


def _bytes(recipes: dict[str, Any]) -> str:
    """Along each axes, less collectives of a few bytes."""
    kinds = sorted(
        {(*row["axes"], row["kind"]) for of in recipes.values() for row in of["traffic"] if row["sent_bytes"] >= 1e6}
    )
    rows = []
    for *axes, kind in kinds:
        moved = (
            _sent(row for row in of["traffic"] if (row["axes"], row["kind"]) == (axes, kind)) for of in recipes.values()
        )
        rows.append(("·".join(axes), kind, *(f"{sent / 1e9:.1f}" for sent in moved)))
    return _table(("axis", "collective", *recipes), rows)


def _share(recipes: dict[str, Any], name: str) -> str:
    """What a recipe gathers, beside bfloat16."""
    return f"{_sent(_operands(recipes[name])) / _sent(_operands(recipes['bf16'])):.0%}"


def _weights(recipes: dict[str, Any], name: str) -> str:
    """What a recipe's layers gather along fsdp, beside bfloat16; the head is bfloat16 in both."""

    def of_layers(recipe: str, dtypes: tuple[str, ...]) -> float:
        return _sent(row for row in _operands(recipes[recipe]) if row["axes"] == ["fsdp"] and row["dtype"] in dtypes)

    head = of_layers(name, ("u16",))
    return f"{of_layers(name, ('u8', 'f32')) / (of_layers('bf16', ('u16',)) - head):.0%}"


def _operands(recipe: dict[str, Any]) -> list[dict[str, Any]]:
    return [row for row in recipe["traffic"] if of_operands(row["kind"], row["dtype"])]


def _sent(rows: Iterable[dict[str, Any]]) -> float:
    return sum(row["sent_bytes"] for row in rows)


def _rates(devices: dict[str, Any]) -> str:
    kinds = dict.fromkeys(kind for of in devices.values() for kind in of["products"])
    rows = [
        (
            kind,
            *(f"{row['peak_tflops'] * row['reached']:.0f}" for of in devices.values() if (row := of["products"][kind])),
        )
        for kind in kinds
    ]
    for name in ("memory", "nvlink", "network"):
        rows.append((f"{name}, GB/s", *(f"{of[name]['gb_s'] * of[name]['reached']:.0f}" for of in devices.values())))
    rows.append(("devices within NVLink", *(str(of["nvlink"]["devices"]) for of in devices.values())))
    for name in ("nvlink", "network"):
        rows.append((f"latency of {name}, µs", *(f"{of[name]['latency_us']:g}" for of in devices.values())))
    return _table(("", *(of["device"] for of in devices.values())), rows)


def _table(titles: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [titles, ("---", *("---:" for _ in titles[1:])), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scaling", description="Plan large models.")
    parser.add_argument("--page", action="store_true", help="only make the page from the results")
    if not parser.parse_args().page:
        print(f"wrote {record.write('scaling', plans())}")
    PAGE.write_text(text(json.loads((record.RESULTS / QUOTED).read_text())))
    print(f"wrote {PAGE.relative_to(record.RESULTS.parent.parent)}")


if __name__ == "__main__":
    main()
