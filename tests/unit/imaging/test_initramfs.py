from __future__ import annotations

import lzma
from pathlib import Path

import pytest

from microvm_mcp.imaging.errors import ImageError
from microvm_mcp.imaging.initramfs import build_initramfs, parse_dependencies
from tests.unit.imaging.test_cpio import read_archive


def module(depends: str) -> bytes:
    return b"\x7fELF\0license=GPL\0depends=" + depends.encode() + b"\0name=x\0"


def write_modules(tree: Path, modules: dict[str, bytes]) -> Path:
    for path, data in modules.items():
        (tree / path).parent.mkdir(parents=True, exist_ok=True)
        (tree / path).write_bytes(lzma.compress(data) if path.endswith(".xz") else data)
    return tree


def test_modules_are_listed_after_what_they_depend_on_and_stored_unpacked(tmp_path: Path) -> None:
    tree = write_modules(
        tmp_path,
        {
            "kernel/net/virtio_net.ko.xz": module("net-failover"),
            "kernel/net/net_failover.ko.xz": module("failover"),
            "kernel/net/failover.ko": module(""),
            "kernel/other.ko.xz": module(""),
        },
    )
    entries = {
        entry.name: entry for entry in read_archive(build_initramfs(tree, ("virtio_net",), b"busy", b"#!init"))
    }
    assert entries["modules/virtio_net.list"].data == b"failover\nnet_failover\nvirtio_net\n"
    assert entries["modules/virtio_net.ko"].data == module("net-failover")
    assert "modules/other.ko" not in entries
    assert entries["init"].data == b"#!init"
    assert entries["init"].mode & 0o111
    assert entries["bin/sh"].data == b"busybox"


def test_missing_module_and_a_circle_are_refused_by_name(tmp_path: Path) -> None:
    tree = write_modules(tmp_path, {"a.ko": module("b"), "b.ko": module("a")})
    with pytest.raises(ImageError, match="no module absent"):
        build_initramfs(tree, ("absent",), b"", b"")
    with pytest.raises(ImageError, match="depends on itself"):
        build_initramfs(tree, ("a",), b"", b"")


def test_dependencies_are_read_from_the_modinfo_section() -> None:
    assert parse_dependencies(module("virtio-ring,crc32")) == ("virtio_ring", "crc32")
    assert parse_dependencies(module("")) == ()
    assert parse_dependencies(b"no such section") == ()
