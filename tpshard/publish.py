"""Puts a finished directory in the place of an output, so that at every moment a whole one is there.

Where system and file system can (Linux, renameat2(2) with RENAME_EXCHANGE) the two are exchanged in one step.
Elsewhere the old one is renamed into the staging directory and the new one into its place: between the two there
is no output, and a run that is killed there has it put back by the next one. What is under way is written down
first, with the inode of the new directory: so whoever comes next can tell whether the exchange has happened.
"""

from __future__ import annotations

import errno
import json
import os
import stat
from pathlib import Path
from typing import NamedTuple

from .stagefolder import OUTPUT, Note, remove_tree

PREVIOUS_SUFFIX = ".tpshard-previous"
_UNDER_WAY = "publishing"
_REPLACED = "replaced"
_OLDER = "older"


class _State(NamedTuple):
    """What ``publishing`` says: the inode of the new directory, whether the old one is kept, and its mode."""

    inode: int
    keep: bool
    mode: int


def previous_path(out: Path) -> Path:
    """Where ``--keep-previous`` leaves what ``out``, a real path, has replaced."""
    return out.with_name(out.name + PREVIOUS_SUFFIX)


def swap(folder: Path, new: Path, out: Path, *, replace: bool, keep: bool) -> None:
    """Put ``new`` in the place of ``out``; what was there is kept as :func:`previous_path`, or left in ``folder``.

    ``folder`` is the staging directory of ``out``, held by the caller. Without ``replace`` only an empty directory
    gives way. Raises OSError; ``out`` is then as it was.
    """
    empty = not replace or not os.path.lexists(out) or next(os.scandir(out), None) is None
    mode = 0 if empty else stat.S_IMODE(os.stat(out).st_mode)
    _write_state(folder, _State(os.stat(new).st_ino, keep and not empty, mode))
    if empty:
        os.rename(new, out)
        return
    if not mode & stat.S_IWUSR:
        os.chmod(out, mode | stat.S_IRWXU)  # or it could not be moved into another directory
    if exchange(new, out):
        os.rename(new, folder / _REPLACED)
    else:
        os.rename(out, folder / _REPLACED)
        try:
            os.rename(new, out)
        except BaseException:
            os.rename(folder / _REPLACED, out)
            os.chmod(out, mode)
            raise
    if keep:
        _keep(folder, out, mode)


def recover(folder: Path, out: Path, note: Note) -> bool:
    """Finish, or take back, what a run that was killed while it published left; True where its output is in place.

    ``folder`` is held by the caller and exists. Raises OSError.
    """
    state = _read_state(folder)
    if state is None:
        return False
    replaced = folder / _REPLACED
    if _inode(out) == state.inode:
        if not os.path.lexists(replaced) and state.mode and os.path.lexists(folder / OUTPUT):
            os.rename(folder / OUTPUT, replaced)  # killed right after the exchange
        if state.keep:
            _keep(folder, out, state.mode)
        return True
    if os.path.lexists(replaced) and not os.path.lexists(out):
        os.rename(replaced, out)
        os.chmod(out, state.mode)
        note(f"{out}: put back; the run that was to replace it was killed while it did")
    (folder / _UNDER_WAY).unlink()
    return False


def exchange(one: Path, two: Path) -> bool:
    """Exchange two directories in one step (Linux, renameat2(2)); False where system or file system cannot."""
    import ctypes

    try:
        rename = ctypes.CDLL(None, use_errno=True).renameat2
    except (OSError, AttributeError):
        return False
    at_working_directory, exchanged = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
    if rename(at_working_directory, os.fsencode(one), at_working_directory, os.fsencode(two), exchanged) == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EPERM):
        return False
    raise OSError(code, os.strerror(code), str(one))


def _keep(folder: Path, out: Path, mode: int) -> None:
    """Move what was replaced to where it is kept; the one that was kept before is left in the folder."""
    replaced, previous, older = folder / _REPLACED, previous_path(out), folder / _OLDER
    if not os.path.lexists(replaced):
        return
    if os.path.lexists(previous):
        if os.path.lexists(older):
            remove_tree(older)
        os.rename(previous, older)
    os.rename(replaced, previous)
    os.chmod(previous, mode)


def _inode(path: Path) -> int:
    try:
        return os.lstat(path).st_ino
    except OSError:
        return -1


def _write_state(folder: Path, state: _State) -> None:
    new = folder / (_UNDER_WAY + "-new")
    written = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
    try:
        os.write(written, json.dumps(state._asdict()).encode())
    finally:
        os.close(written)
    os.rename(new, folder / _UNDER_WAY)


def _read_state(folder: Path) -> _State | None:
    try:
        values = json.loads((folder / _UNDER_WAY).read_bytes()[:4096])
        return _State(int(values["inode"]), bool(values["keep"]), int(values["mode"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None
