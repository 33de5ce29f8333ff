"""Replaces a folder atomically: readers find the old one or the new one, complete, at every moment.

The new folder is written beside the old one, as `.NAME.saving`, synchronised to the disk, and exchanged with it in one
system call (`renameat2` on Linux). Where the system or the file system cannot exchange folders, the old one is renamed
to `.NAME.previous` first; a crash between the two renames leaves it under that name. A lock on the new folder, which
the system releases when a process ends, keeps two processes from saving to the same place.
"""

import contextlib
import ctypes
import errno
import fcntl
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2


@contextlib.contextmanager
def replaced_folder(path: Path, is_obsolete: Callable[[str], bool], *, resume: bool = False) -> Iterator[Path]:
    """Context with a new folder to write to, which takes the place of `path` at its end, unless an error is raised.

    is_obsolete: whether a file of the old folder, by name, is part of the old checkpoint; others are carried over.
    resume: keep what an interrupted call has left in the new folder.
    """
    path = path.resolve()  # a link stays a link to the folder that is replaced
    if path.exists() and not path.is_dir():
        raise FileExistsError(f"{path} is a file; a checkpoint is saved as a folder")
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f".{path.name}.saving")
    new.mkdir(exist_ok=True)
    with _locked(new):
        if not resume:
            _clear(new)
        yield new
        if path.exists():
            _carry_over(path, new, is_obsolete)
        synchronize(new)
        _take_place(new, path)
        synchronize(path.parent)
        if new.exists():  # the old folder now
            shutil.rmtree(new)


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise BlockingIOError(f"another process is saving to {folder}") from None
        yield
    finally:
        os.close(descriptor)


def _clear(folder: Path) -> None:
    for child in folder.iterdir():
        shutil.rmtree(child) if child.is_dir() and not child.is_symlink() else child.unlink()


def _carry_over(old: Path, new: Path, is_obsolete: Callable[[str], bool]) -> None:
    for child in old.iterdir():
        if is_obsolete(child.name) or (new / child.name).exists():
            continue
        if child.is_dir() and not child.is_symlink():
            shutil.copytree(child, new / child.name, copy_function=_link_or_copy, symlinks=True)
        else:
            _link_or_copy(child, new / child.name)


def _link_or_copy(source, target) -> None:
    try:
        os.link(source, target, follow_symlinks=False)
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.EXDEV, errno.EMLINK, errno.ENOTSUP):
            raise
        shutil.copy2(source, target, follow_symlinks=False)


def synchronize(folder: Path) -> None:
    """Writes the entries of a folder to the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _take_place(new: Path, path: Path) -> None:
    if not path.exists():
        new.rename(path)
    elif not _exchanged(new, path):
        previous = path.with_name(f".{path.name}.previous")
        if previous.exists():  # of a crash after which `path` was saved again
            shutil.rmtree(previous)
        path.rename(previous)
        new.rename(path)
        previous.rename(new)  # deleted by the caller


def _exchanged(a: Path, b: Path) -> bool:
    """Exchanges two folders in one step; returns whether the system supports that."""
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if renameat2 is None:
        return False
    if renameat2(_AT_FDCWD, os.fsencode(a), _AT_FDCWD, os.fsencode(b), _RENAME_EXCHANGE) == 0:
        return True
    number = ctypes.get_errno()
    if number in (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP):
        return False
    raise OSError(number, os.strerror(number), str(a), None, str(b))
