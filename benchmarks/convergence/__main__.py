"""`python -m benchmarks.convergence`: all three tests, printed as tables and written to results/."""

import argparse

from tqdm import tqdm

from benchmarks import record
from benchmarks.convergence import bias, gpt, stall


def main(arguments: list[str] | None = None) -> None:
    options = _parser().parse_args(arguments)
    environment = record.environment()
    whole = (options.steps, options.seeds) == (STEPS, SEEDS)
    name = "convergence" if whole else f"convergence-{options.steps}x{options.seeds}"
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
