"""One process of several that load a checkpoint: prints, for each tensor, the bytes read and a checksum of its codes.

python load_shards.py FOLDER COORDINATOR PROCESSES INDEX
"""

import json
import sys
import zlib

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from scaledot.checkpoint.layouts import entries
from scaledot.checkpoint.loading import read_entry
from scaledot.checkpoint.source import open_source


def main(folder: str, coordinator: str, processes: int, index: int) -> None:
    jax.distributed.initialize(coordinator, processes, index)
    mesh = jax.make_mesh((processes,), ("tp",), axis_types=(jax.sharding.AxisType.Auto,))
    source = open_source(folder)
    report = {}
    for name, entry in entries(source).items():
        before = source.reader.bytes_read
        array = read_entry(entry, NamedSharding(mesh, PartitionSpec("tp")))
        codes = np.asarray(jax.tree.leaves(array)[0].addressable_shards[0].data)
        report[name] = [source.reader.bytes_read - before, zlib.crc32(codes.tobytes())]
    print(json.dumps(report))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
