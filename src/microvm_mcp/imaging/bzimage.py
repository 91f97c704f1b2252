"""The ELF kernel inside a bzImage.

The x86 boot protocol's setup header says where the compressed payload lies (`payload_offset` at 0x248, relative to
the protected-mode code, and `payload_length` at 0x24c); its last four bytes are the size of the unpacked ELF file.
Pure: what it returns is still compressed, and a hostile file is an error.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from microvm_mcp.imaging.errors import ImageError

ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
_SECTOR = 512
_SETUP_SECTORS_AT = 0x1F1
_BOOT_FLAG_AT = 0x1FE
_MAGIC_AT = 0x202
_VERSION_AT = 0x206
_PAYLOAD_AT = 0x248
_PAYLOAD_SINCE = 0x0208
"""The protocol version that brought the payload's place."""
_MAX_ELF_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class Payload:
    """A zstd frame and the size that it unpacks to."""

    compressed: bytes
    unpacked_size: int


def parse_payload(image: bytes) -> Payload:
    if len(image) < _PAYLOAD_AT + 8 or image[_MAGIC_AT : _MAGIC_AT + 4] != b"HdrS":
        raise ImageError("The kernel is no bzImage; choose a Debian kernel package for amd64.")
    (boot_flag,) = struct.unpack_from("<H", image, _BOOT_FLAG_AT)
    (version,) = struct.unpack_from("<H", image, _VERSION_AT)
    if boot_flag != 0xAA55 or version < _PAYLOAD_SINCE:
        raise ImageError("The kernel's setup header names no payload; choose a current Debian kernel package.")
    # Zero means four, for kernels older than the field.
    setup_sectors = image[_SETUP_SECTORS_AT] or 4
    offset, length = struct.unpack_from("<II", image, _PAYLOAD_AT)
    start = (setup_sectors + 1) * _SECTOR + offset
    payload = image[start : start + length]
    if length < 8 or len(payload) != length:
        raise ImageError("The kernel file is shorter than its header says; fetch it again.")
    if not payload.startswith(ZSTD_MAGIC):
        raise ImageError("The kernel's payload is not compressed with zstd; choose a Debian 13 kernel package.")
    (unpacked_size,) = struct.unpack_from("<I", payload, length - 4)
    if not 0 < unpacked_size <= _MAX_ELF_BYTES:
        raise ImageError("The kernel's payload names an impossible size; fetch the kernel again.")
    return Payload(payload[:-4], unpacked_size)
