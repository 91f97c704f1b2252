"""An image taken into the state directory: private copies of its files, verified, under their own digest.

What machines are made from must be what was verified. The directory that an operator names can change at any time
(a rebuild publishes by rename), so the files are copied by reflink first and the *copies* are hashed. Digests are
remembered, so that a start with an unchanged image reads none of its bytes. Copies of earlier images go, since the
disk of a machine is a copy of its own.
"""

from __future__ import annotations

import asyncio
import hashlib
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from microvm_mcp.host import disk
from microvm_mcp.host.digest import DigestCache, identity
from microvm_mcp.imaging.errors import ImageError
from microvm_mcp.imaging.manifest import INITRAMFS, KERNEL, ROOT_DISK, Manifest, read_manifest


@dataclass(frozen=True, slots=True)
class Source:
    """What the configuration says. None and the empty string: as the manifest in `directory` says."""

    directory: Path
    kernel: Path | None = None
    kernel_sha256: str = ""
    initramfs: Path | None = None
    initramfs_sha256: str = ""
    root_disk: Path | None = None
    root_disk_sha256: str = ""


@dataclass(frozen=True, slots=True)
class InstalledImage:
    kernel: Path
    initramfs: Path
    root_disk: Path
    root_disk_bytes: int
    digest: str
    """Of the three files together; names the image in rows."""
    kernel_arguments: str
    variant: str


@dataclass(frozen=True, slots=True)
class _Part:
    name: str
    source: Path
    expected: str
    key: str
    """What the configuration calls its digest."""


async def install(source: Source, images: Path) -> InstalledImage:
    """Blocks nothing; may take seconds the first time. ImageError, and NotReflinkable, say what to do."""
    manifest = await asyncio.to_thread(read_manifest, source.directory)
    parts = _parts(source, manifest)
    digest = hashlib.sha256("".join(part.expected for part in parts).encode("ascii")).hexdigest()
    home = images / digest
    cache = await asyncio.to_thread(_open_cache, images)
    if not await asyncio.to_thread(_is_intact, home, parts, cache):
        await _take_in(home, parts, cache)
    for other in await asyncio.to_thread(_other_copies, home):
        await disk.remove_tree(other)
    root_disk = home / ROOT_DISK
    return InstalledImage(
        kernel=home / KERNEL,
        initramfs=home / INITRAMFS,
        root_disk=root_disk,
        root_disk_bytes=root_disk.stat().st_size,
        digest=digest,
        kernel_arguments=manifest.kernel_arguments,
        variant=manifest.variant,
    )


def _parts(source: Source, manifest: Manifest) -> tuple[_Part, ...]:
    named = (
        (KERNEL, source.kernel, source.kernel_sha256, "kernel_sha256"),
        (INITRAMFS, source.initramfs, source.initramfs_sha256, "initramfs_sha256"),
        (ROOT_DISK, source.root_disk, source.root_disk_sha256, "image_sha256"),
    )
    return tuple(
        _Part(name, path or source.directory / name, expected or manifest.files[name].sha256, key)
        for name, path, expected, key in named
    )


def _open_cache(images: Path) -> DigestCache:
    images.mkdir(mode=0o700, exist_ok=True)
    return DigestCache(images / "digests.json")


def _other_copies(home: Path) -> list[Path]:
    return [other for other in home.parent.iterdir() if other.is_dir() and other != home]


def _is_intact(home: Path, parts: tuple[_Part, ...], cache: DigestCache) -> bool:
    """Copies are there and hash right, and what they were made from is still known to hash right."""
    try:
        return all(
            cache.known(part.source) == part.expected and cache.sha256(home / part.name) == part.expected
            for part in parts
        )
    except OSError:
        return False


async def _take_in(home: Path, parts: tuple[_Part, ...], cache: DigestCache) -> None:
    staging = home.with_name(f".new-{home.name}")
    await disk.remove_tree(staging)
    await disk.remove_tree(home)
    staging.mkdir(mode=0o700)
    try:
        for part in parts:
            await _copy(part, staging / part.name, cache)
        await disk.publish(staging, home)
    except BaseException:
        with suppress(OSError):
            await disk.remove_tree(staging)
        raise


async def _copy(part: _Part, target: Path, cache: DigestCache) -> None:
    try:
        before = identity(part.source)
        # The kernel and the initramfs are opened again by the VMM's user, through descriptors.
        await disk.clone(part.source, target, mode=0o600 if part.name == ROOT_DISK else 0o644)
        await disk.sync(target)
        found = await asyncio.to_thread(cache.sha256, target)
        same = identity(part.source) == before
    except OSError as error:
        raise ImageError(
            f"{part.source} cannot be read ({error.strerror}); build the image again, or correct the configuration."
        ) from error
    if found != part.expected or not same:
        raise ImageError(
            f"The SHA-256 digest of {part.source} is {found}, not {part.expected} as {part.key} or the manifest "
            f"says; build the image again, or correct {part.key}."
        )
    cache.remember(before, found)
