"""The initramfs: busybox, our /init and the kernel modules that it may load, with what those depend on.

The modules come out of the kernel package; each says in its own .modinfo section what it needs, so nothing here
depends on depmod. Modules are stored unpacked, and the archive as a whole uncompressed: an emulated guest reads
faster than it unpacks.
"""

from __future__ import annotations

import lzma
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from microvm_mcp.imaging import cpio
from microvm_mcp.imaging.errors import ImageError

_DEPENDS = re.compile(rb"\0depends=([^\0]*)\0")
_DIRECTORIES = ("bin", "dev", "modules", "proc", "root", "sys")


def build_initramfs(modules_tree: Path, wanted: tuple[str, ...], busybox: bytes, init: bytes) -> bytes:
    """`modules_tree`: /usr/lib/modules/VERSION of the kernel."""
    modules = _Modules(modules_tree)
    return render_initramfs({name: modules.load_order(name) for name in wanted}, modules.data, busybox, init)


def render_initramfs(
    lists: Mapping[str, tuple[str, ...]], modules: Mapping[str, bytes], busybox: bytes, init: bytes
) -> bytes:
    """`lists`: per module that /init may ask for, all that must be loaded, in order."""

    def entries() -> Iterator[cpio.Entry]:
        yield from (cpio.directory(name) for name in _DIRECTORIES)
        # The kernel opens the console before /init has mounted anything.
        yield cpio.character_device("dev/console", 5, 1)
        yield cpio.file("bin/busybox", busybox, 0o755)
        yield from (
            cpio.link(f"bin/{name}", "busybox") for name in ("cat", "insmod", "mount", "sh", "sleep", "switch_root")
        )
        yield from (cpio.file(f"modules/{name}.ko", modules[name]) for name in sorted(modules))
        for name, order in sorted(lists.items()):
            yield cpio.file(f"modules/{name}.list", "".join(f"{module}\n" for module in order).encode())
        yield cpio.file("init", init, 0o755)

    return cpio.render_archive(entries())


class _Modules:
    """Modules by name (with underscores), read and unpacked when first asked for."""

    def __init__(self, tree: Path) -> None:
        self._paths = {_name(path): path for path in tree.rglob("*.ko*")}
        self.data: dict[str, bytes] = {}

    def load_order(self, name: str) -> tuple[str, ...]:
        order: dict[str, None] = {}
        self._visit(name, order, ())
        return tuple(order)

    def _visit(self, name: str, order: dict[str, None], above: tuple[str, ...]) -> None:
        if name in order:
            return
        if name in above:
            raise ImageError(f"Kernel module {name} depends on itself; choose another kernel package.")
        for needed in parse_dependencies(self._read(name)):
            self._visit(needed, order, (*above, name))
        order[name] = None

    def _read(self, name: str) -> bytes:
        if name not in self.data:
            path = self._paths.get(name)
            if path is None:
                raise ImageError(f"The kernel package has no module {name}; correct the recipe's kernel.modules.")
            raw = path.read_bytes()
            self.data[name] = lzma.decompress(raw) if path.suffix == ".xz" else raw
        return self.data[name]


def parse_dependencies(module: bytes) -> tuple[str, ...]:
    found = _DEPENDS.search(module)
    text = found.group(1).decode("ascii") if found else ""
    return tuple(name.replace("-", "_") for name in text.split(",") if name)


def _name(path: Path) -> str:
    return path.name.partition(".")[0].replace("-", "_")
