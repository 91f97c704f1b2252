"""Digests of what goes into an image. Pure.

`inputs_digest` covers everything that this project controls: recipe, package names, pins, overlay, supervisor,
variant and the builder itself. What the mirror serves on a day is not covered: the manifest pins the image that was
built, not the recipe. `tree_digest` covers what a downloaded tree depends on, and is the key of its cache.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import asdict

from microvm_mcp.imaging.recipe import Debian, Recipe

_TREE_SCHEMA = {"installed": 1, "unpacked": 3}
"""Raised when `debian.py` makes another tree of the same packages."""


def inputs_digest(recipe: Recipe, supervisor_sha256: str, builder_sha256: str) -> str:
    variant = recipe.variant
    return _digest(
        {
            "debian": _debian(recipe.debian),
            "kernel": [list(recipe.kernel_packages), list(recipe.kernel_modules), _sha256(recipe.init)],
            "downloads": [asdict(recipe.node), asdict(recipe.pnpm)] if variant.node else [],
            "variant": [
                *(variant.name, sorted(variant.packages), variant.disk_mib, variant.bytes_per_inode),
                *(variant.install, list(variant.mask), list(variant.remove), list(variant.links)),
            ],
            "overlay": [[item.path, _sha256(item.data), item.executable] for item in variant.overlay],
            "supervisor": supervisor_sha256,
            "builder": builder_sha256,
        }
    )


def tree_digest(debian: Debian, packages: Iterable[str], *, install: bool) -> str:
    kind = "installed" if install else "unpacked"
    return _digest(
        {"kind": kind, "schema": _TREE_SCHEMA[kind], "debian": _debian(debian), "packages": sorted(packages)}
    )


def _debian(debian: Debian) -> list[str]:
    return [debian.architecture, str(debian.keyring), *debian.sources()]


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _digest(value: object) -> str:
    return _sha256(json.dumps(value, sort_keys=True, separators=(",", ":")).encode())
