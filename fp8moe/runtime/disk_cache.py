"""Entries of a cache folder that nobody but this user can have written: what is read from one becomes code.

A folder is used only if it belongs to this user (the effective one) and nobody else may write to it, rename
it or put another one in its place. Entries are regular files of this user, each with a checksum.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
import tempfile
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path

_FLAGS = ("O_NOFOLLOW", "O_NONBLOCK", "O_CLOEXEC", "O_BINARY")  # a FIFO is opened without a writer
_OPEN_ENTRY = os.O_RDONLY | sum(getattr(os, flag, 0) for flag in _FLAGS)
LOCKED = 60  # seconds that a process waits for another one's lock


def read_entry(folder: Path, name: str) -> bytes | None:
    """An entry's content; None where there is none, or a damaged one. OSError says why one is not used."""
    try:
        entry = _own(folder) / name
        descriptor = os.open(entry, _OPEN_ENTRY)
    except FileNotFoundError:
        return None
    try:
        info = os.fstat(descriptor)
        if not stat.S_ISREG(info.st_mode):
            raise PermissionError(f"{entry} is no regular file")
        _check(entry, info)
        with os.fdopen(descriptor, "rb", closefd=False) as file:
            content = file.read()
    finally:
        os.close(descriptor)
    digest, content = content[:32], content[32:]
    return content if hashlib.sha256(content).digest() == digest else None


def write_entry(folder: Path, name: str, content: bytes) -> None:
    """Write an entry atomically: concurrent processes never see a partial one. OSError says why it is not
    written."""
    make_folder(folder)
    descriptor, temporary = tempfile.mkstemp(dir=_own(folder))
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(hashlib.sha256(content).digest() + content)
        os.replace(temporary, _own(folder) / name)
    except BaseException:  # a full disk, or a folder in the place of the entry
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


@contextlib.contextmanager
def locked_entry(folder: Path, name: str) -> Iterator[None]:
    """Hold an entry's lock, so that of several processes one makes it; the system releases it if that ends.
    OSError says why it is not held: a file system without locks, or a process that has it for a minute."""
    import fcntl

    make_folder(folder)
    place = _own(folder) / f"{name}.lock"
    descriptor = os.open(place, os.O_RDWR | os.O_CREAT | _OPEN_ENTRY, 0o600)
    try:
        deadline = time.monotonic() + LOCKED
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.01)
        try:
            yield
        finally:
            # first: whoever has the file open and waits will find the entry, and whoever opens it anew, too
            with contextlib.suppress(OSError):
                os.unlink(place)
            with contextlib.suppress(OSError):  # as of a network's file system: the entry is made
                fcntl.flock(descriptor, fcntl.LOCK_UN)  # also for a forked child, which has the descriptor
    finally:
        with contextlib.suppress(OSError):
            os.close(descriptor)


def make_folder(folder: Path) -> None:
    """Make a cache folder, and those above it, for this user alone. OSError says why one is not used."""
    for missing in [p for p in (folder, *folder.parents) if not p.exists()][::-1]:
        missing.mkdir(0o700, exist_ok=True)
    _own(folder)


def _own(folder: Path) -> Path:
    """The folder's path without symbolic links. PermissionError names what others could change."""
    given, real = Path(os.path.abspath(folder)), Path(os.path.realpath(folder))
    _check(real, real.lstat())
    for place in (*real.parents, given, *given.parents):
        _check(place, place.lstat(), above=True)
    return real


def _check(place: Path, info: os.stat_result, above: bool = False) -> None:
    """Raise PermissionError for what does not belong to this user, or what others may write to. above: for
    the folders that a cache folder lies in, which may be root's."""
    if not hasattr(os, "geteuid"):  # Windows: a user's folders are closed to others unless he opens them
        return
    user = os.geteuid()
    if info.st_uid != user and not (above and info.st_uid == 0):
        raise PermissionError(f"{place} belongs to user {info.st_uid}, and this process runs as user {user}")
    # in a folder with a sticky bit others cannot rename or remove what is this user's or root's
    if stat.S_ISLNK(info.st_mode) or (above and info.st_mode & stat.S_ISVTX):
        return
    writable = info.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    if writable and not (writable == stat.S_IWGRP and _is_private(info.st_gid)):
        raise PermissionError(f"other users may write to {place} (chmod go-w takes that from them)")


@cache
def _is_private(group: int) -> bool:
    """Whether a group has this user as its only member: where every user has such a group, his umask is
    usually 002, and his folders are writable for it."""
    import grp
    import pwd

    try:
        user, members = pwd.getpwuid(os.geteuid()), grp.getgrgid(group)
    except KeyError:
        return False
    own = user.pw_uid != 0 and user.pw_gid == group and members.gr_name == user.pw_name
    return own and {*members.gr_mem} <= {user.pw_name}
