"""What a built image says of itself: `manifest.json` beside its files.

Pure but for reading and hashing. A manifest that is wrong in any field is an `ImageError`, never half believed.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from microvm_mcp.imaging.errors import ImageError

SCHEMA = 1
MANIFEST = "manifest.json"
KERNEL = "vmlinuz"
KERNEL_ELF = "vmlinux"
INITRAMFS = "initramfs.img"
ROOT_DISK = "rootfs.raw"
FILES = (KERNEL, KERNEL_ELF, INITRAMFS, ROOT_DISK)
KERNEL_ARGUMENTS = (
    "root=/dev/vda rw init=/sbin/init quiet loglevel=3 panic=-1"
    # Without BPF among them systemd does not compile its own policy program at boot: seconds of an emulated one.
    " lsm=landlock,yama"
    # A boot is a sequence of grace periods that nobody else waits for.
    " rcupdate.rcu_expedited=1 rcupdate.rcu_normal_after_boot=1"
    " random.trust_cpu=on audit=0"
)
"""What every driver passes on, before its own console and clock arguments."""

_SHA256 = re.compile(r"[0-9a-f]{64}")
_MAX_BYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class FileRecord:
    sha256: str
    size: int


@dataclass(frozen=True, slots=True)
class Manifest:
    schema: int
    variant: str
    architecture: str
    built_at: str
    """UTC, ISO 8601."""
    inputs_digest: str
    kernel_version: str
    kernel_arguments: str
    wire_version: int
    supervisor_version: str
    supervisor_sha256: str
    """Of the archive of sources that `imaging.supervisor` makes."""
    files: Mapping[str, FileRecord]
    packages: Mapping[str, str]
    """Version by package name; what did not come from Debian is listed by its own name."""


def render_manifest(manifest: Manifest) -> bytes:
    return (json.dumps(asdict(manifest), indent=1, sort_keys=True) + "\n").encode()


def read_manifest(directory: Path) -> Manifest:
    path = directory / MANIFEST
    try:
        with path.open("rb") as file:
            data = file.read(_MAX_BYTES + 1)
    except OSError as error:
        raise ImageError("The directory has no readable manifest.json; build the image into it.") from error
    return parse_manifest(data)


def parse_manifest(data: bytes) -> Manifest:
    if len(data) > _MAX_BYTES:
        raise ImageError("The image's manifest is too large to be one; build the image again.")
    try:
        value: object = json.loads(data)
    except ValueError as error:
        raise _wrong("manifest.json") from error
    top = _object(value, "manifest.json")
    if top.get("schema") != SCHEMA:
        raise ImageError(f"The image's manifest is not of schema {SCHEMA}; build the image again.")
    files = {name: _file(record, name) for name, record in _object(top.get("files"), "files").items()}
    if set(files) != set(FILES):
        raise _wrong("files")
    packages = _object(top.get("packages"), "packages")
    return Manifest(
        schema=SCHEMA,
        variant=_text(top, "variant"),
        architecture=_text(top, "architecture"),
        built_at=_text(top, "built_at"),
        inputs_digest=_sha256(top, "inputs_digest"),
        kernel_version=_text(top, "kernel_version"),
        kernel_arguments=_text(top, "kernel_arguments"),
        wire_version=_number(top, "wire_version"),
        supervisor_version=_text(top, "supervisor_version"),
        supervisor_sha256=_sha256(top, "supervisor_sha256"),
        files=files,
        packages={name: _text(packages, name) for name in packages},
    )


def record_file(path: Path) -> FileRecord:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return FileRecord(digest, path.stat().st_size)


def same_sizes(directory: Path, manifest: Manifest) -> bool:
    """A quick look, before work is spared; who runs the image compares the digests."""
    paths = {name: directory / name for name in manifest.files}
    return all(
        path.is_file() and not path.is_symlink() and path.stat().st_size == manifest.files[name].size
        for name, path in paths.items()
    )


def _file(value: object, name: str) -> FileRecord:
    record = _object(value, name)
    return FileRecord(_sha256(record, "sha256"), _number(record, "size"))


def _object(value: object, where: str) -> Mapping[str, object]:
    if not isinstance(value, dict):
        raise _wrong(where)
    return value


def _text(table: Mapping[str, object], key: str) -> str:
    value = table.get(key)
    if not isinstance(value, str) or not value:
        raise _wrong(key)
    return value


def _sha256(table: Mapping[str, object], key: str) -> str:
    value = _text(table, key)
    if not _SHA256.fullmatch(value):
        raise _wrong(key)
    return value


def _number(table: Mapping[str, object], key: str) -> int:
    value = table.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise _wrong(key)
    return value


def _wrong(where: str) -> ImageError:
    return ImageError(f"The image's manifest is damaged at {where}; build the image again.")
