"""The supervisor as a zip archive that Python runs: what `microvm_mcp.guest` and `microvm_mcp.wire` are, no more.

Reproducible: sorted names, one timestamp, no compression (unpacking costs an emulated guest more than reading).
The bytes depend on the sources alone, so their digest names the supervisor.
"""

from __future__ import annotations

import hashlib
import io
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

_PARTS = ("wire", "guest")
_EPOCH = (1980, 1, 1, 0, 0, 0)
"""The earliest time that a zip archive can carry."""
_MAIN = b"from microvm_mcp.guest.__main__ import main\n\nmain()\n"


@dataclass(frozen=True, slots=True)
class Supervisor:
    sources: Mapping[str, bytes]
    """By name in the archive, sorted."""
    archive: bytes
    sha256: str


def build_supervisor(package: Path) -> Supervisor:
    """`package`: the directory of `microvm_mcp`."""
    sources = {"__main__.py": _MAIN, **dict(_collect(package))}
    archive = render_zip(sources)
    return Supervisor(sources, archive, hashlib.sha256(archive).hexdigest())


def render_zip(files: Mapping[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_STORED) as archive:
        for name in sorted(files):
            info = zipfile.ZipInfo(name, _EPOCH)
            info.external_attr = 0o100644 << 16
            info.create_system = 3
            archive.writestr(info, files[name])
    return buffer.getvalue()


def _collect(package: Path) -> Iterator[tuple[str, bytes]]:
    yield f"{package.name}/__init__.py", (package / "__init__.py").read_bytes()
    for part in _PARTS:
        for path in sorted((package / part).rglob("*.py")):
            yield f"{package.name}/{path.relative_to(package).as_posix()}", path.read_bytes()
