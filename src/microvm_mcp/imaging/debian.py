"""Debian packages as a tree, by mmdebstrap, kept in the cache as a tar archive.

mmdebstrap takes the host's apt configuration (proxies, certificates); sources and keyring come from the recipe.
It runs in a mount namespace of its own, so that nothing it mounts outlives it, whatever ends it.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from microvm_mcp.host.command import run, run_lines
from microvm_mcp.imaging.cache import Cache
from microvm_mcp.imaging.inputs import tree_digest
from microvm_mcp.imaging.progress import Progress
from microvm_mcp.imaging.recipe import Debian
from microvm_mcp.imaging.requirements import client_environment

PACKAGES_FILE = ".microvm-packages"
"""In a tree that was only unpacked: name, tab, version of each package, one per line."""

_DOWNLOAD_TIMEOUT_S = 1800.0
_UNPACK_TIMEOUT_S = 300.0
# Hooks get the tree as $1. All packages are still there as files when they have been unpacked.
_LIST_PACKAGES = (
    'for deb in "$1"/var/cache/apt/archives/*.deb; do dpkg-deb --show "$deb"; done >"$1"/' + PACKAGES_FILE
)
# Where no maintainer script runs, nobody else compiles the standard library, and each start would.
_COMPILE_PYTHON = (
    'for library in "$1"/usr/lib/python3.*; do [ -d "$library" ] || continue;'
    ' chroot "$1" /usr/bin/python3 -I -S -m compileall -q --invalidation-mode unchecked-hash "${library#"$1"}"'
    " || exit 1; done"
)
_LEFT_OUT = (
    *("path-exclude=/usr/share/man/*", "path-exclude=/usr/share/info/*", "path-exclude=/usr/share/locale/*"),
    *(
        "path-exclude=/usr/share/doc/*",
        "path-include=/usr/share/doc/*/copyright",
        "path-exclude=/usr/share/lintian/*",
    ),
)


async def fetch_tree(
    cache: Cache,
    name: str,
    debian: Debian,
    packages: tuple[str, ...],
    *,
    install: bool,
    fresh: bool,
    progress: Progress,
) -> Path:
    """The tar archive of a root file system with these packages. `fresh`: not from the cache."""
    entry = f"{name}-{tree_digest(debian, packages, install=install)[:24]}.tar"
    archive = cache.entry(entry)
    if archive.is_file() and not fresh:
        progress.detail("taken from the cache")
        return archive
    with cache.adding(entry) as scratch:
        sources = scratch / "sources.list"
        sources.write_text("".join(f"{line}\n" for line in debian.sources()))
        argv = [
            *("unshare", "--mount", "--propagation", "private", "--"),
            *("mmdebstrap", "--mode=root", "--format=tar", f"--architectures={debian.architecture}"),
            *(f"--variant={'apt' if install else 'extract'}", f"--include={','.join(packages)}"),
            *(f"--dpkgopt={option}" for option in _LEFT_OUT),
            *(() if install else (f"--extract-hook={_LIST_PACKAGES}", f"--extract-hook={_COMPILE_PYTHON}")),
            *(debian.suite, str(scratch / entry), str(sources)),
        ]
        environment = {**client_environment(), "TMPDIR": str(scratch)}
        await run_lines(argv, progress.detail, timeout_s=_DOWNLOAD_TIMEOUT_S, env=environment)
    return archive


async def unpack_tree(archive: Path, into: Path, only: Iterable[str] = ()) -> None:
    """Owners as numbers, extended attributes as they are. `only`: patterns of members, all without."""
    argv = [
        "tar",
        "--extract",
        f"--file={archive}",
        f"--directory={into}",
        "--numeric-owner",
        "--preserve-permissions",
    ]
    argv += ["--xattrs", "--xattrs-include=*", "--exclude=./dev/*"]
    if patterns := tuple(only):
        argv += ["--wildcards", *patterns]
    await run(argv, timeout_s=_UNPACK_TIMEOUT_S)


def read_package_versions(tree: Path) -> dict[str, str]:
    """By name. dpkg's own record where packages were installed, else the list made while unpacking."""
    status = tree / "var/lib/dpkg/status"
    if status.is_file() and status.stat().st_size:
        return parse_dpkg_status(status.read_text("utf-8"))
    lines = (tree / PACKAGES_FILE).read_text("utf-8").splitlines()
    pairs = (line.partition("\t") for line in lines)
    return {name: version for name, _, version in sorted(pairs)}


def parse_dpkg_status(text: str) -> dict[str, str]:
    """Stanzas of `Field: value` lines, one per package, separated by empty lines."""
    versions: dict[str, str] = {}
    for stanza in text.split("\n\n"):
        fields = dict(line.split(": ", 1) for line in stanza.splitlines() if ": " in line and line[0] != " ")
        if fields.get("Status", "").endswith(" installed"):
            versions[fields["Package"]] = fields["Version"]
    return dict(sorted(versions.items()))
