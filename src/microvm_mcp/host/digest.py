"""SHA-256 of large files, remembered while the file is certainly the same.

A root file system is gigabytes; hashing it at every start would make each restart of the service slower by seconds.
So digests are kept in a file of the state directory, keyed by device, inode, size and the two change times. Only
root can set the ctime of a file back, and root needs no such trick.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

_CHUNK = 4 << 20
_MAX_REMEMBERED = 64


def sha256_file(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb", buffering=0) as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


class DigestCache:
    """`path` may be missing or damaged: then everything is hashed anew, nothing is believed."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._known = _load(path)

    def sha256(self, file: Path) -> str:
        """Blocking; may take seconds. Raises OSError."""
        key = identity(file)
        if key not in self._known:
            digest = sha256_file(file)
            if identity(file) != key:
                # Somebody writes to it: the digest is of no state the file was ever in.
                return digest
            self._known[key] = digest
            self._save()
        return self._known[key]

    def remember(self, identity: str, digest: str) -> None:
        """For who knows by another way, say from a private copy, what the file of that `identity` holds."""
        self._known[identity] = digest
        self._save()

    def known(self, file: Path) -> str | None:
        """Without reading the file. Raises OSError."""
        return self._known.get(identity(file))

    def _save(self) -> None:
        newest = dict(list(self._known.items())[-_MAX_REMEMBERED:])
        temporary = self._path.with_name(self._path.name + ".new")
        temporary.write_text(json.dumps(newest, indent=0), encoding="ascii")
        temporary.chmod(0o600)
        temporary.replace(self._path)


def identity(file: Path) -> str:
    """Differs as soon as anything about the file's content may differ. Raises OSError."""
    stat = file.stat()
    return f"{stat.st_dev}:{stat.st_ino}:{stat.st_size}:{stat.st_mtime_ns}:{stat.st_ctime_ns}"


def _load(path: Path) -> dict[str, str]:
    try:
        raw = json.loads(path.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return {}
    if not isinstance(raw, dict):
        return {}
    return {k: v for k, v in raw.items() if isinstance(k, str) and isinstance(v, str) and len(v) == 64}
