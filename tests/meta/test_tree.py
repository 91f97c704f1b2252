"""The tree keeps its own rules: module size, empty packages, documents that point at things that exist."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCES = sorted((ROOT / "src").rglob("*.py"))
MAX_LINES = 500
MAX_MEDIAN = 220


def lines(path: Path) -> int:
    return len(path.read_text(encoding="utf-8").splitlines())


def tracked(*patterns: str) -> list[Path]:
    done = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", *patterns],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    return [ROOT / line for line in done.stdout.splitlines() if (ROOT / line).is_file()]


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(ROOT / "src")))
def test_no_module_grows_over_the_limit(path: Path) -> None:
    assert lines(path) <= MAX_LINES


def test_the_median_module_fits_on_a_few_screens() -> None:
    sizes = sorted(lines(path) for path in SOURCES if path.name != "__init__.py")
    assert sizes[len(sizes) // 2] <= MAX_MEDIAN


def test_packages_export_nothing() -> None:
    top = ROOT / "src" / "microvm_mcp" / "__init__.py"
    crowded = [path for path in SOURCES if path.name == "__init__.py" and path != top and path.read_text().strip()]
    assert crowded == []


def test_every_module_says_what_it_is_for() -> None:
    silent = [p for p in SOURCES if p.read_text().strip() and not p.read_text().lstrip().startswith(('"""', "#!"))]
    assert silent == []


def test_links_in_documents_lead_somewhere() -> None:
    broken = []
    for page in tracked("*.md"):
        for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text(encoding="utf-8")):
            if "://" not in target and not (page.parent / target).exists():
                broken.append(f"{page.relative_to(ROOT)}: {target}")
    assert broken == []


def test_decisions_are_numbered_without_gaps() -> None:
    numbers = sorted(int(page.name[:4]) for page in (ROOT / "docs" / "adr").glob("*.md"))
    assert numbers == list(range(1, len(numbers) + 1))
    for page in (ROOT / "docs" / "adr").glob("*.md"):
        assert page.read_text().startswith(f"# {int(page.name[:4])}. ")


def test_no_file_names_the_place_where_it_was_written() -> None:
    words = re.compile("|".join(("/" + "work/", "/" + r"root/\.", "deb" + r"\.debian\.org/debian-mirror")))
    found = [
        f"{path.relative_to(ROOT)}: {line.strip()[:80]}"
        for path in tracked("*.py", "*.md", "*.toml", "scripts/*", "image/*", "bench/*", ".ci/*")
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines()
        if words.search(line)
    ]
    assert found == []


def test_shell_is_never_asked_to_run_a_command() -> None:
    found = [
        str(path.relative_to(ROOT))
        for path in SOURCES
        if re.search(
            r"shell=True|os\.system\(|os\.popen\(|create_subprocess_shell", path.read_text(encoding="utf-8")
        )
    ]
    assert found == []
