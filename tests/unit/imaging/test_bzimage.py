from __future__ import annotations

import struct

import pytest

from microvm_mcp.imaging.bzimage import ZSTD_MAGIC, parse_payload
from microvm_mcp.imaging.errors import ImageError

SETUP_SECTORS = 3
OFFSET = 40


def bzimage(
    payload: bytes, *, setup_sectors: int = SETUP_SECTORS, version: int = 0x20F, length: int | None = None
) -> bytes:
    """A file with the fields of the boot protocol where the kernel puts them."""
    start = ((setup_sectors or 4) + 1) * 512 + OFFSET
    image = bytearray(start) + payload + b"what follows the payload"
    image[0x1F1] = setup_sectors
    struct.pack_into("<H", image, 0x1FE, 0xAA55)
    image[0x202:0x206] = b"HdrS"
    struct.pack_into("<H", image, 0x206, version)
    struct.pack_into("<II", image, 0x248, OFFSET, len(payload) if length is None else length)
    return bytes(image)


def payload(unpacked_size: int = 1234) -> bytes:
    return ZSTD_MAGIC + b"frame" + struct.pack("<I", unpacked_size)


@pytest.mark.parametrize("setup_sectors", [3, 0])
def test_payload_is_found_by_the_setup_header_without_its_size_field(setup_sectors: int) -> None:
    found = parse_payload(bzimage(payload(), setup_sectors=setup_sectors))
    assert found.compressed == ZSTD_MAGIC + b"frame"
    assert found.unpacked_size == 1234


@pytest.mark.parametrize(
    ("image", "said"),
    [
        (b"", "no bzImage"),
        (b"\x7fELF" + bytes(4096), "no bzImage"),
        (bzimage(payload(), version=0x207), "names no payload"),
        (bzimage(payload(), length=1 << 31), "shorter than its header says"),
        (bzimage(payload(), length=4), "shorter than its header says"),
        (bzimage(b"\x1f\x8b" + payload()), "not compressed with zstd"),
        (bzimage(payload(0)), "impossible size"),
        (bzimage(payload(0xFFFFFFFF)), "impossible size"),
    ],
)
def test_file_without_a_usable_payload_is_refused_by_what_is_wrong(image: bytes, said: str) -> None:
    with pytest.raises(ImageError, match=said):
        parse_payload(image)
