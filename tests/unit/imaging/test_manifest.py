from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from microvm_mcp.imaging import manifest as m
from microvm_mcp.imaging.errors import ImageError


def manifest() -> m.Manifest:
    return m.Manifest(
        schema=m.SCHEMA,
        variant="standard",
        architecture="amd64",
        built_at="2026-01-02T03:04:05Z",
        inputs_digest="a" * 64,
        kernel_version="6.12.1-cloud-amd64",
        kernel_arguments=m.KERNEL_ARGUMENTS,
        wire_version=1,
        supervisor_version="0.1.0",
        supervisor_sha256="b" * 64,
        files={name: m.FileRecord("c" * 64, 3) for name in m.FILES},
        packages={"bash": "5.2-1", "libstdc++6": "14-1"},
    )


def test_manifest_reads_back_as_written() -> None:
    assert m.parse_manifest(m.render_manifest(manifest())) == manifest()


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("schema", 2),
        ("schema", None),
        ("inputs_digest", "A" * 64),
        ("inputs_digest", "a" * 63),
        ("supervisor_sha256", None),
        ("wire_version", "1"),
        ("wire_version", True),
        ("variant", ""),
        ("files", {}),
        ("files", []),
        ("files", {name: {"sha256": "c" * 64, "size": -1} for name in m.FILES}),
        ("files", {name: {"sha256": "c" * 64} for name in m.FILES}),
        ("packages", {"bash": 5}),
        ("packages", None),
    ],
)
def test_wrong_field_makes_the_whole_manifest_wrong(key: str, value: object) -> None:
    table = json.loads(m.render_manifest(manifest()))
    table[key] = value
    with pytest.raises(ImageError, match="manifest"):
        m.parse_manifest(json.dumps(table).encode())


@pytest.mark.parametrize("data", [b"", b"[]", b"{", b"null", b"\xff\xfe", b" " * (5 << 20)])
def test_what_is_no_manifest_is_refused(data: bytes) -> None:
    with pytest.raises(ImageError, match="manifest"):
        m.parse_manifest(data)


def test_files_of_other_sizes_missing_ones_and_links_are_not_taken_for_the_image(tmp_path: Path) -> None:
    for name in m.FILES:
        (tmp_path / name).write_bytes(b"abc")
    assert m.same_sizes(tmp_path, manifest())
    larger = {**manifest().files, m.KERNEL: m.FileRecord("c" * 64, 4)}
    assert not m.same_sizes(tmp_path, replace(manifest(), files=larger))
    (tmp_path / m.KERNEL).rename(tmp_path / "elsewhere")
    assert not m.same_sizes(tmp_path, manifest())
    (tmp_path / m.KERNEL).symlink_to("elsewhere")
    assert not m.same_sizes(tmp_path, manifest())


def test_record_holds_digest_and_size_of_the_file(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"abc")
    record = m.record_file(tmp_path / "x")
    assert record.sha256 == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    assert record.size == len(b"abc")
