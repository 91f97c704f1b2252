"""An image is verified by the private copy that machines are made from."""

from __future__ import annotations

import hashlib
import json
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest

from microvm_mcp.host import digest
from microvm_mcp.imaging import manifest as manifests
from microvm_mcp.imaging.errors import ImageError
from microvm_mcp.imaging.install import Source, install

pytestmark = pytest.mark.needs("root", "reflink")


@pytest.fixture
def reflink(reflink_dir: Path) -> Path:
    return Path(tempfile.mkdtemp(dir=reflink_dir))


CONTENT = {name: f"content of {name}".encode() for name in manifests.FILES}


def build(directory: Path, content: dict[str, bytes] = CONTENT) -> Source:
    directory.mkdir(exist_ok=True)
    for name, data in content.items():
        staging = directory / f"{name}.new"
        staging.write_bytes(data)
        staging.replace(directory / name)
    records = {
        name: manifests.FileRecord(hashlib.sha256(data).hexdigest(), len(data)) for name, data in content.items()
    }
    made = manifests.Manifest(
        schema=manifests.SCHEMA,
        variant="tiny",
        architecture="amd64",
        built_at="2026-01-01T00:00:00+00:00",
        inputs_digest="0" * 64,
        kernel_version="6.12",
        kernel_arguments="root=/dev/vda",
        wire_version=1,
        supervisor_version="0.1.0",
        supervisor_sha256="0" * 64,
        files=records,
        packages={},
    )
    (directory / manifests.MANIFEST).write_bytes(manifests.render_manifest(made))
    return Source(directory)


async def test_copies_are_private_and_as_the_manifest_says(reflink: Path) -> None:
    installed = await install(build(reflink / "image"), reflink / "images")
    assert installed.root_disk.read_bytes() == CONTENT[manifests.ROOT_DISK]
    assert installed.kernel.read_bytes() == CONTENT[manifests.KERNEL]
    assert installed.root_disk_bytes == len(CONTENT[manifests.ROOT_DISK])
    assert installed.root_disk.stat().st_mode & 0o777 == 0o600
    assert (reflink / "images").stat().st_mode & 0o777 == 0o700


async def test_unchanged_image_is_not_read_again(reflink: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = build(reflink / "image")
    first = await install(source, reflink / "images")

    def refuse(path: Path) -> str:
        raise AssertionError(path)

    monkeypatch.setattr(digest, "sha256_file", refuse)
    assert await install(source, reflink / "images") == first


async def test_rebuilt_image_replaces_the_copy_and_gets_another_digest(reflink: Path) -> None:
    first = await install(build(reflink / "image"), reflink / "images")
    second = await install(build(reflink / "image", CONTENT | {manifests.KERNEL: b"newer"}), reflink / "images")
    assert second.digest != first.digest
    assert second.kernel.read_bytes() == b"newer"
    assert not first.root_disk.exists()


@pytest.mark.parametrize("name", [manifests.KERNEL, manifests.INITRAMFS, manifests.ROOT_DISK])
async def test_file_that_does_not_match_is_refused_by_name_and_leaves_nothing(reflink: Path, name: str) -> None:
    source = build(reflink / "image")
    (reflink / "image" / name).write_bytes(b"tampered with")
    with pytest.raises(ImageError, match=name):
        await install(source, reflink / "images")
    assert [entry.name for entry in (reflink / "images").iterdir() if entry.is_dir()] == []


async def test_damaged_copy_is_made_anew(reflink: Path) -> None:
    source = build(reflink / "image")
    first = await install(source, reflink / "images")
    first.root_disk.write_bytes(b"scribbled over")
    again = await install(source, reflink / "images")
    assert again.root_disk.read_bytes() == CONTENT[manifests.ROOT_DISK]


async def test_configured_digest_wins_over_the_manifest(reflink: Path) -> None:
    source = replace(build(reflink / "image"), root_disk_sha256="f" * 64)
    with pytest.raises(ImageError, match="image_sha256"):
        await install(source, reflink / "images")


async def test_missing_file_is_refused_with_the_way_out(reflink: Path) -> None:
    source = build(reflink / "image")
    (reflink / "image" / manifests.INITRAMFS).unlink()
    with pytest.raises(ImageError, match="build the image again"):
        await install(source, reflink / "images")


async def test_manifest_of_another_schema_is_refused(reflink: Path) -> None:
    source = build(reflink / "image")
    path = reflink / "image" / manifests.MANIFEST
    path.write_text(json.dumps(json.loads(path.read_text()) | {"schema": 99}))
    with pytest.raises(ImageError, match="schema"):
        await install(source, reflink / "images")
