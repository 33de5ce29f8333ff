"""`python -m benchmarks.scaling`: plans large models on many devices and generates docs/notes/scaling.md.

Plans are those of `scaledot plan`: layers are compiled and their collectives counted, nothing is run.
`--page` only regenerates the page from the results file. All numbers come from the file; the text is below.
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
SHOWN = 2  # the plan whose bytes are listed per mesh axis

TEXT = """# Past one host

<!-- Made by `python -m benchmarks.scaling`; change that, not this. -->

What does low precision gain for a model that is sharded over thousands of devices? This is a **model**, not a
measurement: collectives are those of programs that XLA compiled for the mesh, and times follow from a table of rates,
some measured and some assumed. Made with jax {jax}, {date}:
[{results}](../../benchmarks/results/{results}).

```
scaledot plan --model llama3-405b --devices 10240 --sequence-parallel
scaledot plan --model mine.json --mesh dp=4,fsdp=8,tp=8 --recipes fp8_block nvfp4 --json plan.json
```

## How

* **Programs.** The four linear layers of a decoder block, forward and backward as in a step of many blocks, under
  `train.einsum` on explicit mesh axes: weights are sharded over fsdp and tp (column-parallel, then row-parallel),
  tokens over dp and fsdp, and with sequence parallelism activations between the layers over tp. XLA compiles them for
  that many CPU devices from shapes alone, in a child process. bfloat16 is the same program with a recipe without casts.
  The output head is bfloat16 in all plans.
* **Bytes.** Collectives, their dtypes, sizes and replica groups are read from the compiled HLO, and replica groups are
  mapped to mesh axes. bfloat16 is transferred as `u16`, codes as `u8`. Among n devices, each sends (n − 1)/n of the
  bytes of an all-gather or reduce-scatter, twice that of an all-reduce, and all bytes of a collective-permute. Tests
  compare the bytes with closed formulas on meshes of eight devices.
* **Many devices.** Devices along dp run identical programs: for more than 2048 devices the mesh is compiled with dp = 2
  and the same tokens per device, and the formulas use the true size. A test compiles both.
* **Time.** FLOPs over the rate of each kind of matmul; bytes of casts and of Adam over the memory bandwidth; bytes sent
  over NVLink's bandwidth if a group lies within an NVLink domain, otherwise over the network's; and a latency per
  collective. *No overlap* is the sum. *Full overlap* is the maximum of compute, NVLink and network. A real step lies
  between the two.
* **Memory.** float32 weights, gradients and two moments, sharded over fsdp and tp; the residuals that `train` saves
  (codes under a recipe); one block's gathered weights. If a step does not fit, `scaledot plan` proposes the nearest
  mesh of as many devices that does, or the smallest number of devices.

## Plans

*Gathered* are operands, which recipes shrink; *sent* includes gradients and partial results, which stay float32. Times
are milliseconds per step, *speedup* is over bfloat16.

{plans}

## Where the bytes go

{shown}, gigabytes that a device sends per step:

{bytes}

## What limits, and what codes gain

* In the plan above, gathered bytes shrink to {eight} of bfloat16's with 8-bit codes and to {four} with nvfp4; those of
  weights alone to {fp8_weights} (fp8_block) and {nvfp4_weights} (nvfp4), including scales. Recipes with 1D blocks along
  the contracting dim gather tokens in two orientations, for dgrad and wgrad, which costs part of the gain.
* Reductions do not shrink: {sums} of the bytes that a device sends under bfloat16 are float32 partial results, over the
  network those of weight gradients. They bound the gain of smaller codes. Reductions in 16 bits or in codes are not
  offered: gradients would be rounded once per device.
* If fsdp groups extend beyond an NVLink domain, the network is the bottleneck, and codes gain what they save there. One
  sequence per tp group is too little work to hide two all-gathers of weights and one reduce-scatter of gradients. More
  tokens (`--batch`) would hide more, within memory; pipeline parallelism, which is not modelled, would transfer fewer
  weights; a larger NVLink domain leaves the network only the all-reduce along dp.
* Per-tensor scales need a small all-reduce of amax for each cast (`fp8_current`, and `nvfp4`'s second level): at the
  assumed latencies {latency} ms of the plan above. Block-scaled recipes need none, and `amax_scope="local"` omits those
  that are not needed.
* On Hopper, MXFP8 and NVFP4 matmuls run on operands dequantised to bfloat16, so they gain bytes and memory only; on
  Blackwell their matmuls are faster too, at assumed rates.

## Rates

Achieved TFLOP/s of matmuls, and GB/s. Matmuls, casts and memory of the H200 were measured; attention, links and
latencies, and the fraction of the data sheet's peak that other devices achieve, are assumed. Each figure has its source
in [devices/](../../scaledot/plan/devices).

{rates}

## What is left out

Pipeline, expert and context parallelism; partial overlap; norms, activation functions, rotary embeddings and the loss;
the embedding lookup and its gradient; rematerialisation; collectives of attention, of which there are none as long as
heads are not split; gradient accumulation (plan one micro-batch, and count the reductions along dp once). Links are not
shared with other jobs, networks do not congest, and hierarchical collectives, which would send less over the network
than one ring if several devices of a group share an NVLink domain, are not modelled. Devices never fail.
"""


def plans() -> dict[str, Any]:
    """Runs `scaledot plan` for every case and returns the record."""
    cases = []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "plan.json"
        for arguments in CASES:
            if scaledot(["plan", *arguments.split(), "--json", str(path)]):
                raise SystemExit(1)
            cases.append({"arguments": arguments} | json.loads(path.read_text()))
    return {"environment": record.environment(), "plans": cases}


def text(results: dict[str, Any]) -> str:
    environment, cases = results["environment"], results["plans"]
    shown = cases[SHOWN]["recipes"]
    reductions = 1 - _sent(_operands(shown["bf16"])) / _sent(shown["bf16"]["traffic"])
    small = [row for row in shown["fp8_current"]["traffic"] if row["sent_bytes"] < 1e6]
    return TEXT.format(
        jax=environment["jax"],
        date=environment["date"][:10],
        results=QUOTED,
        plans="\n\n".join(map(_plan, cases)),
        shown=_title(cases[SHOWN]),
        bytes=_bytes(shown),
        eight=", ".join(f"{_share(shown, name)} ({name})" for name in ("fp8_current", "fp8_block", "mxfp8")),
        four=_share(shown, "nvfp4"),
        fp8_weights=_weights(shown, "fp8_block"),
        nvfp4_weights=_weights(shown, "nvfp4"),
        sums=f"{reductions:.0%}",
        latency=f"{sum(row['ms'] for row in small):.0f}",
        rates=_rates({plan["rates"]["name"]: plan["rates"] for plan in cases}),
    )


def _title(plan: dict[str, Any]) -> str:
    mesh = ", ".join(f"{axis} {size}" for axis, size in plan["mesh"].items())
    return f"{plan['model']['name']} on {_devices(plan['mesh'])} × {plan['rates']['device']} ({mesh})"


def _devices(mesh: dict[str, int]) -> int:
    return mesh["dp"] * mesh["fsdp"] * mesh["tp"]


def _plan(plan: dict[str, Any]) -> str:
    base, rows = plan["recipes"]["bf16"], []
    for name, recipe in plan["recipes"].items():
        gathered, step = _sent(_operands(recipe)), recipe["step_ms"]
        links = [sum(row["ms"] for row in recipe["traffic"] if row["link"] == link) for link in ("nvlink", "network")]
        rows.append(
            (
                name,
                f"{gathered / 1e9:.1f}",
                _share(plan["recipes"], name),
                f"{_sent(recipe['traffic']) / 1e9:.1f}",
                f"{sum(recipe['work_ms'].values()):.0f}",
                *(f"{ms:.0f}" for ms in links),
                f"{step['in_turns']:.0f}",
                f"{base['step_ms']['in_turns'] / step['in_turns']:.2f} ×",
                f"{step['at_once']:.0f} ({step['limit']})",
                f"{base['step_ms']['at_once'] / step['at_once']:.2f} ×",
                f"{sum(recipe['memory_bytes'].values()) / 1e9:.0f} of {plan['rates']['memory']['gb']:g}",
            )
        )
    titles = ("recipe", "GB gathered", "of bf16", "GB sent", "compute", "NVLink", "network")
    titles += ("no overlap", "speedup", "full overlap", "speedup", "GB of memory")
    compiled = "" if plan["compiled_mesh"] == plan["mesh"] else f", compiled for {_devices(plan['compiled_mesh'])}"
    tokens = f"{plan['batch']} × {plan['sequence']} tokens per tp group of {plan['mesh']['tp']} devices"
    return f"**{_title(plan)}**, {tokens}{compiled}: `{plan['arguments']}`\n\n{_table(titles, rows)}"


def _bytes(recipes: dict[str, Any]) -> str:
    """A table of bytes per mesh axes and kind of collective, without collectives of less than 1 MB."""
    traffic = [recipe["traffic"] for recipe in recipes.values()]
    kinds = sorted({(*row["axes"], row["kind"]) for rows in traffic for row in rows if row["sent_bytes"] >= 1e6})
    table = []
    for *axes, kind in kinds:
        sent = (_sent(row for row in rows if (row["axes"], row["kind"]) == (axes, kind)) for rows in traffic)
        table.append(("·".join(axes), kind, *(f"{count / 1e9:.1f}" for count in sent)))
    return _table(("axis", "collective", *recipes), table)


def _share(recipes: dict[str, Any], name: str) -> str:
    """The bytes of operands that a recipe gathers, relative to bfloat16."""
    return f"{_sent(_operands(recipes[name])) / _sent(_operands(recipes['bf16'])):.0%}"


def _weights(recipes: dict[str, Any], name: str) -> str:
    """The bytes of layers' weights gathered along fsdp, relative to bfloat16; the output head is bfloat16 in both."""

    def gathered(recipe: str, dtypes: tuple[str, ...]) -> float:
        return _sent(row for row in _operands(recipes[recipe]) if row["axes"] == ["fsdp"] and row["dtype"] in dtypes)

    head = gathered(name, ("u16",))
    return f"{gathered(name, ('u8', 'f32')) / (gathered('bf16', ('u16',)) - head):.0%}"


def _operands(recipe: dict[str, Any]) -> list[dict[str, Any]]:
    return [row for row in recipe["traffic"] if of_operands(row["kind"], row["dtype"])]


def _sent(rows: Iterable[dict[str, Any]]) -> float:
    return sum(row["sent_bytes"] for row in rows)


def _rates(devices: dict[str, Any]) -> str:
    rates = list(devices.values())
    kinds = dict.fromkeys(kind for device in rates for kind in device["products"])
    rows = []
    for kind in kinds:
        matmuls = (device["products"][kind] for device in rates)
        rows.append((kind, *(f"{matmul['peak_tflops'] * matmul['reached']:.0f}" for matmul in matmuls)))
    for name in ("memory", "nvlink", "network"):
        rows.append((f"{name}, GB/s", *(f"{device[name]['gb_s'] * device[name]['reached']:.0f}" for device in rates)))
    rows.append(("devices per NVLink domain", *(str(device["nvlink"]["devices"]) for device in rates)))
    for name in ("nvlink", "network"):
        rows.append((f"latency of {name}, µs", *(f"{device[name]['latency_us']:g}" for device in rates)))
    return _table(("", *(device["device"] for device in rates)), rows)


def _table(titles: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [titles, ("---", *("---:" for _ in titles[1:])), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scaling", description="Plan large models.")
    parser.add_argument("--page", action="store_true", help="only regenerate the page from the results file")
    if not parser.parse_args().page:
        print(f"wrote {record.write('scaling', plans())}")
    PAGE.write_text(text(json.loads((record.RESULTS / QUOTED).read_text())))
    print(f"wrote {PAGE.relative_to(record.RESULTS.parent.parent)}")


if __name__ == "__main__":
    main()
