"""Text that every machine with Python has: the source of its standard library and of its installed packages.

Files are deduplicated by the SHA-256 of their contents and ordered by it: a fixed shuffle, in which paths play no part.
One file in 100, by its hash, is held out. The corpus depends on the installed packages and their versions, so that
results name it by the SHA-256 of both splits.
"""

import concurrent.futures
import dataclasses
import hashlib
import os
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

LIMIT = 64 * 2**20  # bytes of the training split
HELD_OUT_SHARE = 32  # the held-out split has at most 1/32 of that
LARGEST_FILE = 2**20  # bytes; larger ones are tables of data
ONE_IN = 100
READERS = 16
# Packages whose files depend on the state of this repository, which must not change the corpus.
OWN_PACKAGES = ("scaledot", "__editable__")


@dataclasses.dataclass(frozen=True, eq=False)
class Corpus:
    """Bytes (uint8) of both splits; files: in both splits; sha256: of the training bytes, then the held-out bytes."""

    train: np.ndarray
    held_out: np.ndarray
    files: int
    sha256: str

    def about(self) -> dict[str, Any]:
        sizes = {"train_bytes": self.train.size, "held_out_bytes": self.held_out.size}
        return {"files": self.files, **sizes, "sha256": self.sha256}


def read(limit: int = LIMIT, roots: Iterable[Path] | None = None) -> Corpus:
    """Returns up to `limit` training bytes, and the held-out bytes, of the Python files below `roots`.

    roots: by default the folders of the standard library and of installed packages.
    """
    paths = sorted(source_files(python_folders() if roots is None else roots))
    by_digest = dict(sorted(_digests(paths)))
    train_files = [path for digest, path in by_digest.items() if not is_held_out(digest)]
    held_out_files = [path for digest, path in by_digest.items() if is_held_out(digest)]
    train, held_out = _contents(train_files, limit), _contents(held_out_files, limit // HELD_OUT_SHARE)
    train_data, held_out_data = (np.frombuffer(b"".join(contents), np.uint8) for contents in (train, held_out))
    sha256 = hashlib.sha256(b"".join(train + held_out)).hexdigest()
    return Corpus(train_data, held_out_data, len(train) + len(held_out), sha256)


def is_held_out(digest: str) -> bool:
    # The last digits, because files are ordered by the first ones: both splits are samples of the whole corpus.
    return int(digest[-8:], 16) % ONE_IN == 0


def python_folders() -> set[Path]:
    """Returns the folders of the standard library and of installed packages, without those inside another."""
    folders = {Path(sysconfig.get_path(name)).resolve() for name in ("stdlib", "purelib", "platlib")}
    return {folder for folder in folders if not folders & set(folder.parents)}


def source_files(roots: Iterable[Path]) -> Iterator[Path]:
    """Yields the Python files below `roots`, except empty ones, those above LARGEST_FILE and OWN_PACKAGES."""
    folders = [os.fspath(root) for root in roots]
    while folders:
        with os.scandir(folders.pop()) as entries:
            for entry in entries:
                if entry.name.startswith(OWN_PACKAGES):
                    continue
                if entry.is_dir(follow_symlinks=False):
                    folders.append(entry.path)
                # is_file is False for a broken link
                elif entry.name.endswith(".py") and entry.is_file() and 0 < entry.stat().st_size <= LARGEST_FILE:
                    yield Path(entry.path)


def _digests(paths: Sequence[Path]) -> list[tuple[str, Path]]:
    """Returns (SHA-256, path) of the files that are valid UTF-8."""
    with concurrent.futures.ThreadPoolExecutor(READERS) as pool:
        digests = list(tqdm(pool.map(_digest, paths), "corpus", len(paths), unit="file", leave=False, disable=None))
    return [(digest, path) for digest, path in zip(digests, paths, strict=True) if digest is not None]


def _digest(path: Path) -> str | None:
    contents = path.read_bytes()
    try:
        contents.decode()
    except UnicodeDecodeError:
        return None
    return hashlib.sha256(contents).hexdigest()


def _contents(paths: Iterable[Path], limit: int) -> list[bytes]:
    """Returns the contents of the first files, as many as have at most `limit` bytes together."""
    contents, size = [], 0
    for path in paths:
        data = path.read_bytes()
        size += len(data)
        if size > limit:
            break
        contents.append(data)
    return contents
