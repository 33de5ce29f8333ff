"""Signal-to-noise ratio of 4-bit formats with E4M3 scales per 16 elements, on normal and heavy-tailed samples.

The bits of codes and scales do not depend on the device, so a CPU measures what holds everywhere.
"""

from dataclasses import replace
from unittest import mock

import numpy as np

import scaledot as sd
from benchmarks import record
from scaledot.numerics import scale_search

SIZE = 1024
FREEDOM = 3  # of Student's t
FORMATS = {
    "nvfp4": sd.FORMATS["nvfp4"],
    'nvfp4, search="four_over_six"': replace(sd.FORMATS["nvfp4"], search="four_over_six"),
    'nvfp4, search="scales"': replace(sd.FORMATS["nvfp4"], search="scales"),
    "nvint4": sd.FORMATS["nvint4"],
    'nvint4, search="scales"': replace(sd.FORMATS["nvint4"], search="scales"),
    "if4": sd.FORMATS["if4"],
    'if4, search="scales"': replace(sd.FORMATS["if4"], search="scales"),
}
# The best five of the eight scales that `search="scales"` tries. Another name, so that no cached program is reused.
FIVE_SCALES = replace(sd.FORMATS["nvfp4"], name="nvfp4_five_scales", search="scales")
FIVE_OFFSETS = (0, -1, 1, 4, 5)
SAMPLES = {
    "normal": lambda random, shape: random.normal(size=shape),
    "laplace": lambda random, shape: random.laplace(size=shape),
    "student_t3": lambda random, shape: random.standard_t(FREEDOM, size=shape),
}


def run(size: int, repeats: int) -> dict:
    """Prints and returns the mean SNR over `repeats` samples (size, size) of each distribution, in dB."""
    rows = [_row(name, format, size, repeats) for name, format in FORMATS.items()]
    with mock.patch.dict(scale_search.OFFSETS, {FIVE_SCALES.element: FIVE_OFFSETS}):
        rows.append(_row('nvfp4, search="scales", 5 of 8 scales', FIVE_SCALES, size, repeats))
    return {"environment": record.environment(), "size": size, "samples": repeats, "rows": rows}


def _row(name: str, format: sd.Format, size: int, samples: int) -> dict:
    decibels = {kind: _mean_snr(kind, format, None, size, samples) for kind in SAMPLES}
    decibels["normal, 16x16 blocks"] = _mean_snr("normal", format, (16, 16), size, samples)
    print(f"{name:<40}" + "".join(f"{kind} {value:5.2f}  " for kind, value in decibels.items()), flush=True)
    return {"format": name, "snr_db": decibels}


def _mean_snr(kind: str, format: sd.Format, block: tuple[int, int] | None, size: int, samples: int) -> float:
    arrays = (SAMPLES[kind](np.random.default_rng(seed), (size, size)).astype(np.float32) for seed in range(samples))
    return float(np.mean([_snr(x, format, block) for x in arrays]))


def _snr(x: np.ndarray, format: sd.Format, block: tuple[int, int] | None) -> float:
    error = x - np.asarray(sd.dequantize(sd.quantize(x, format, block=block)))
    return 10 * np.log10(np.sum(np.square(x, dtype=np.float64)) / np.sum(np.square(error, dtype=np.float64)))
