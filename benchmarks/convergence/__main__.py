"""`python -m benchmarks.convergence`: all three tests, printed as tables and written to results/."""

import argparse

import jax
from tqdm import tqdm

from benchmarks import record
from benchmarks.convergence import bias, gpt, stall


def main(arguments: list[str] | None = None) -> None:
    options = _parser().parse_args(arguments)
    jax.config.update("jax_default_matmul_precision", "highest")  # so that float32 is float32 on a GPU, too
    environment = record.environment()
    environment["device"] = jax.devices()[0].device_kind
    name = _name(options.steps, options.seeds, environment["device"])
    journal = record.RESULTS / f"{name}-jax{environment['jax']}.unfinished.jsonl"
    print("bias: error of the mean of 1, 10, 100, 1000 draws; stall: error left; gpt: excess nats, gap to float32")
    with tqdm(total=bias.steps() + stall.steps() + gpt.updates(options.steps), unit="part", leave=False) as progress:
        result = {
            "suite": "convergence",
            "steps": options.steps,
            "seeds": options.seeds,
            "environment": environment,
            "bias": bias.run(progress),
            "stall": stall.run(progress),
            "gpt": gpt.run(options.steps, options.seeds, journal, progress),
        }
    result["relations"] = gpt.relations(result["gpt"])
    for relation in result["relations"]:
        print(f"{relation['what']}: {relation['value']:+.4f} {'met' if relation['met'] else 'MISSED'}")
    print(f"wrote {record.write(name, result)}")
    journal.unlink()


STEPS, SEEDS = 600, 3


def _name(steps: int, seeds: int, device: str) -> str:
    """Of the results: by device, and a shorter run never takes the place of a whole one."""
    where = [] if device == "cpu" else [device.lower().replace(" ", "-")]
    size = [] if steps >= STEPS and seeds >= SEEDS else [f"{steps}x{seeds}"]
    return "-".join(["convergence", *where, *size])


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.convergence", description=__doc__)
    parser.add_argument("--steps", type=_steps, default=STEPS, help="of the tiny GPT (default %(default)s)")
    parser.add_argument("--seeds", type=int, default=SEEDS, help="of the tiny GPT (default %(default)s)")
    return parser


def _steps(text: str) -> int:
    value = int(text)
    if value < gpt.CHUNK or value % gpt.CHUNK:
        raise argparse.ArgumentTypeError(f"must be a multiple of {gpt.CHUNK}, not {value}")
    return value


if __name__ == "__main__":
    main()
