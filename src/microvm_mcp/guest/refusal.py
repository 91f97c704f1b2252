"""What the supervisor will not do, as an exception: a code of the wire and one sentence."""

from __future__ import annotations

import errno

from microvm_mcp.wire.messages import ErrorCode

_BY_ERRNO = {
    errno.ENOENT: (ErrorCode.NOT_FOUND, "no such file or directory"),
    errno.EACCES: (ErrorCode.DENIED, "the permissions of the file or its directory do not allow it"),
    errno.EPERM: (ErrorCode.DENIED, "the guest does not permit it"),
    errno.EROFS: (ErrorCode.DENIED, "the file system is read-only"),
    errno.ENOSPC: (ErrorCode.NO_SPACE, "the guest's disk is full; delete files in the guest"),
    errno.EDQUOT: (ErrorCode.NO_SPACE, "the guest's disk quota is used up; delete files in the guest"),
    errno.EFBIG: (ErrorCode.TOO_LARGE, "the file would be larger than the guest allows"),
    errno.ENAMETOOLONG: (ErrorCode.INVALID, "a component of the path is longer than 255 bytes"),
    errno.EINVAL: (ErrorCode.INVALID, "the guest's file system does not take that path"),
    errno.ENOTDIR: (ErrorCode.INVALID, "a component of the path is not a directory"),
    errno.ELOOP: (ErrorCode.SYMLINK, "a component of the path is a symbolic link; name the real path"),
    errno.EISDIR: (ErrorCode.NOT_REGULAR, "the path names a directory, not a regular file"),
    errno.ENXIO: (ErrorCode.NOT_REGULAR, "the path names no regular file"),
    errno.EAGAIN: (ErrorCode.BUSY, "the file is held by a program in the guest"),
}


class Refusal(Exception):
    def __init__(self, code: ErrorCode, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message


def refusal_of(error: OSError) -> Refusal:
    code, message = _BY_ERRNO.get(
        error.errno or 0,
        (ErrorCode.FAILED, f"the guest failed: {errno.errorcode.get(error.errno or 0, 'unknown')}"),
    )
    return Refusal(code, message)
