"""Small file systems that only one command and its processes see, so that they can be filled. This needs root.

``python -m tests.cli.supervise.own_mounts DIRECTORY MODULE ...`` mounts one there, and runs the module.
"""

from __future__ import annotations

import ctypes
import functools
import os
import runpy
import sys

_OWN_MOUNTS, _PRIVATE = 0x20000, (1 << 18) | (1 << 14)  # CLONE_NEWNS; MS_PRIVATE and MS_REC
_LIBC = ctypes.CDLL(None, use_errno=True)


def mount(directory: str) -> None:
    """Mount a file system of 64 MB, which only this process and its children see."""
    _check(_LIBC.unshare(_OWN_MOUNTS))
    _check(_LIBC.mount(b"none", b"/", None, ctypes.c_ulong(_PRIVATE), None))
    _check(_LIBC.mount(b"tmpfs", os.fsencode(directory), b"tmpfs", ctypes.c_ulong(0), b"size=64m"))


@functools.cache
def can_mount() -> bool:
    """Return whether the system allows it."""
    process_id = os.fork()
    if not process_id:
        try:
            mount("/dev/shm")
        except OSError:
            os._exit(1)
        os._exit(0)
    return os.waitpid(process_id, 0)[1] == 0


def join_mounts_of(process_id: int) -> None:
    """See what another process sees: the tests fork the processes of a command from one that was there before it."""
    directory = os.getcwd()
    descriptor = os.open(f"/proc/{process_id}/ns/mnt", os.O_RDONLY)
    _check(_LIBC.setns(descriptor, _OWN_MOUNTS))
    os.close(descriptor)
    os.chdir(directory)


def _check(result: int) -> None:
    if result:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


if __name__ == "__main__":
    mount(sys.argv[1])
    sys.argv = sys.argv[2:]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
