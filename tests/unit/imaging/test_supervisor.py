from __future__ import annotations

import io
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import microvm_mcp
from microvm_mcp.imaging.supervisor import build_supervisor, render_zip

PACKAGE = Path(microvm_mcp.__file__).parent


def test_archive_depends_on_the_sources_alone(tmp_path: Path) -> None:
    package = tmp_path / "microvm_mcp"
    for name in ("wire/a.py", "guest/__main__.py", "__init__.py", "guest/note.txt", "host/secret.py"):
        (package / name).parent.mkdir(parents=True, exist_ok=True)
        (package / name).write_text("x = 1\n")
    first = build_supervisor(package)
    os.utime(package / "wire/a.py", (1, 1))
    (package / "wire/a.py").chmod(0o600)
    assert build_supervisor(package).archive == first.archive
    names = zipfile.ZipFile(io.BytesIO(first.archive)).namelist()
    assert names == [
        "__main__.py",
        "microvm_mcp/__init__.py",
        "microvm_mcp/guest/__main__.py",
        "microvm_mcp/wire/a.py",
    ]
    (package / "wire/a.py").write_text("x = 2\n")
    assert build_supervisor(package).sha256 != first.sha256


def test_supervisor_of_this_tree_starts_on_the_standard_library_alone(tmp_path: Path) -> None:
    archive = tmp_path / "supervisor.pyz"
    archive.write_bytes(build_supervisor(PACKAGE).archive)
    argv = [sys.executable, "-I", "-S", str(archive), "--no-such-option"]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=30, check=False, cwd=tmp_path)
    assert done.returncode != 0
    assert "unknown option" in done.stderr
    assert "Traceback" not in done.stderr


def test_zip_carries_no_time_and_no_compression() -> None:
    archive = zipfile.ZipFile(io.BytesIO(render_zip({"b": b"2" * 100, "a": b"1"})))
    assert archive.namelist() == ["a", "b"]
    assert {(info.date_time, info.compress_type) for info in archive.infolist()} == {
        ((1980, 1, 1, 0, 0, 0), zipfile.ZIP_STORED)
    }
