"""The recipe of an image: what `image/` says, checked and typed.

Owns reading `recipe.toml`, `versions.toml`, the package lists and the overlay. Everything found here is an input of
the image; `inputs.py` makes a digest of it. Wrong data in it is an `ImageError` that names the place.
"""

from __future__ import annotations

import re
import stat
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from microvm_mcp.imaging.errors import ImageError

BUILT_IN_VARIANTS = ("standard", "tiny")
_VARIANT_NAME = re.compile(r"[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?")
_PACKAGE_NAME = re.compile(r"[a-z0-9][a-z0-9+.-]+")
"""Debian policy 5.6.1; no versions, no architectures, nothing that apt could read as an option."""
_SHA256 = re.compile(r"[0-9a-f]{64}")
_MIRROR = re.compile(r"https?://[A-Za-z0-9.:\[\]_-]+(?:/[A-Za-z0-9._~/-]*)?")
_MAX_PACKAGES = 2000


@dataclass(frozen=True, slots=True)
class Debian:
    suite: str
    architecture: str
    mirror: str
    security_mirror: str
    keyring: Path

    def sources(self) -> tuple[str, ...]:
        """One-line apt sources: the suite, its updates and its security updates."""
        option = f"[signed-by={self.keyring}]"
        return (
            f"deb {option} {self.mirror} {self.suite} main",
            f"deb {option} {self.mirror} {self.suite}-updates main",
            f"deb {option} {self.security_mirror} {self.suite}-security main",
        )

    def at_mirror(self, mirror: str) -> Debian:
        if not _MIRROR.fullmatch(mirror):
            raise ImageError(
                "The mirror is no plain http or https address; give one like http://deb.debian.org/debian."
            )
        return replace(self, mirror=mirror.rstrip("/"), security_mirror=f"{mirror.rstrip('/')}-security")


@dataclass(frozen=True, slots=True)
class Download:
    package: str
    version: str
    file: str
    sha256: str


@dataclass(frozen=True, slots=True)
class Overlay:
    """One file exactly as it lands in the image; `path` is relative to its root."""

    path: str
    data: bytes
    executable: bool


@dataclass(frozen=True, slots=True)
class Variant:
    name: str
    packages: tuple[str, ...]
    disk_mib: int
    bytes_per_inode: int
    install: bool
    """False: packages are unpacked, their maintainer scripts never run, nothing can be added."""
    node: bool
    mask: tuple[str, ...]
    remove: tuple[str, ...]
    links: tuple[tuple[str, str], ...]
    overlay: tuple[Overlay, ...]


@dataclass(frozen=True, slots=True)
class Recipe:
    debian: Debian
    kernel_packages: tuple[str, ...]
    kernel_modules: tuple[str, ...]
    init: bytes
    """The initramfs' /init."""
    node: Download
    pnpm: Download
    variant: Variant


def recipe_directory() -> Path:
    """Inside the installed package, or beside `src` in a checkout."""
    package = Path(__file__).resolve().parent.parent
    for candidate in (package / "_image", package.parent.parent / "image"):
        if (candidate / "recipe.toml").is_file():
            return candidate
    raise ImageError("The image recipe is missing from this installation; install microvm-mcp again.")


def load_recipe(directory: Path, variant: str, extra_packages: tuple[str, ...] = ()) -> Recipe:
    if not _VARIANT_NAME.fullmatch(variant):
        raise ImageError("A variant's name is 1 to 63 of a-z, 0-9 and -, and begins and ends with neither dash.")
    recipe = _Table.read(directory / "recipe.toml")
    versions = _Table.read(directory / "versions.toml")
    # A further variant is the standard image with other packages.
    shape = variant if variant in BUILT_IN_VARIANTS else "standard"
    debian, kernel = recipe.table("debian"), recipe.table("kernel")
    return Recipe(
        debian=Debian(
            debian.text("suite"),
            debian.text("architecture"),
            debian.text("mirror"),
            debian.text("security_mirror"),
            Path(debian.text("keyring")),
        ),
        kernel_packages=kernel.texts("packages"),
        kernel_modules=kernel.texts("modules"),
        init=(directory / "initramfs" / "init").read_bytes(),
        node=_download(versions.table("node")),
        pnpm=_download(versions.table("pnpm")),
        variant=_variant(directory, variant, shape, recipe.table("variants").table(shape), extra_packages),
    )


def parse_packages(text: str, source: str) -> tuple[str, ...]:
    """Names in order of appearance, each once; `source` names the list in errors."""
    names: dict[str, None] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        name = line.partition("#")[0].strip()
        if not name:
            continue
        if not _PACKAGE_NAME.fullmatch(name):
            raise ImageError(f"Line {number} of {source} is no Debian package name; write one name per line.")
        names[name] = None
    if len(names) > _MAX_PACKAGES:
        raise ImageError(f"{source} lists more than {_MAX_PACKAGES} packages; shorten it.")
    return tuple(names)


def read_packages(path: Path) -> tuple[str, ...]:
    try:
        return parse_packages(path.read_text("utf-8"), path.name)
    except (OSError, UnicodeDecodeError) as error:
        raise ImageError(
            f"The package list {path.name} cannot be read; check its name and its encoding."
        ) from error


def _variant(directory: Path, name: str, shape: str, table: _Table, extra: tuple[str, ...]) -> Variant:
    if extra and not table.flag("install"):
        raise ImageError(f"The {shape} variant takes no further packages; choose another --variant name.")
    listed = read_packages(directory / f"packages-{shape}.txt")
    overlay = {item.path: item for part in ("common", shape) for item in _overlay(directory / "overlay" / part)}
    return Variant(
        name=name,
        packages=tuple(dict.fromkeys(listed + extra)),
        disk_mib=table.number("disk_mib"),
        bytes_per_inode=table.number("bytes_per_inode"),
        install=table.flag("install"),
        node=table.flag("node"),
        mask=table.texts("mask"),
        remove=table.texts("remove"),
        links=table.pairs("links"),
        overlay=tuple(overlay[path] for path in sorted(overlay)),
    )


def _overlay(root: Path) -> Iterator[Overlay]:
    for path in sorted(root.rglob("*")):
        if not path.is_file() or path.is_symlink():
            continue
        data = path.read_bytes()
        # A wheel may lose the mode; a script says what it is by its first line.
        executable = bool(path.stat().st_mode & stat.S_IXUSR) or data.startswith(b"#!")
        yield Overlay(path.relative_to(root).as_posix(), data, executable)


def _download(table: _Table) -> Download:
    download = Download(table.text("package"), table.text("version"), table.text("file"), table.text("sha256"))
    if not _SHA256.fullmatch(download.sha256):
        raise ImageError(f"{table.where}.sha256 is no SHA-256; pin the file by 64 hex digits.")
    return download


@dataclass(frozen=True, slots=True)
class _Table:
    """A TOML table that knows where it stands, for errors that name the key."""

    where: str
    values: Mapping[str, object]

    @classmethod
    def read(cls, path: Path) -> _Table:
        try:
            return cls(path.name, tomllib.loads(path.read_text("utf-8")))
        except (OSError, ValueError) as error:
            raise ImageError(f"{path.name} of the image recipe cannot be read; restore it.") from error

    def table(self, key: str) -> _Table:
        value = self.values.get(key)
        if not isinstance(value, dict):
            raise self._wrong(key, "a table")
        return _Table(f"{self.where}: {key}", value)

    def text(self, key: str) -> str:
        value = self.values.get(key)
        if not isinstance(value, str) or not value:
            raise self._wrong(key, "a text")
        return value

    def number(self, key: str) -> int:
        value = self.values.get(key)
        if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
            raise self._wrong(key, "a positive number")
        return value

    def flag(self, key: str) -> bool:
        value = self.values.get(key)
        if not isinstance(value, bool):
            raise self._wrong(key, "true or false")
        return value

    def texts(self, key: str) -> tuple[str, ...]:
        value = self.values.get(key)
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self._wrong(key, "a list of texts")
        return tuple(value)

    def pairs(self, key: str) -> tuple[tuple[str, str], ...]:
        value = self.values.get(key)
        if not isinstance(value, list):
            raise self._wrong(key, "a list of pairs")
        pairs: list[tuple[str, str]] = []
        for item in value:
            match item:
                case [str(path), str(target)]:
                    pairs.append((path, target))
                case _:
                    raise self._wrong(key, "a list of pairs")
        return tuple(pairs)

    def _wrong(self, key: str, wanted: str) -> ImageError:
        return ImageError(f"{self.where}.{key} must be {wanted}; correct the image recipe.")
