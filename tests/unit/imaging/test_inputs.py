from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from microvm_mcp.imaging.inputs import inputs_digest, tree_digest
from microvm_mcp.imaging.recipe import Overlay, Recipe, load_recipe, recipe_directory

Change = Callable[[Recipe], Recipe]


def variant(**changes: object) -> Change:
    return lambda recipe: replace(recipe, variant=replace(recipe.variant, **changes))  # type: ignore[arg-type]


CHANGES: dict[str, Change] = {
    "mirror": lambda recipe: replace(recipe, debian=recipe.debian.at_mirror("http://other.example/debian")),
    "kernel packages": lambda recipe: replace(recipe, kernel_packages=("linux-image-amd64",)),
    "modules": lambda recipe: replace(recipe, kernel_modules=()),
    "init": lambda recipe: replace(recipe, init=b"other"),
    "node pin": lambda recipe: replace(recipe, node=replace(recipe.node, sha256="0" * 64)),
    "pnpm pin": lambda recipe: replace(recipe, pnpm=replace(recipe.pnpm, version="0")),
    "name": variant(name="other"),
    "packages": variant(packages=("systemd",)),
    "size": variant(disk_mib=4096),
    "mask": variant(mask=()),
    "links": variant(links=()),
    "removed": variant(remove=()),
    "overlay": variant(overlay=(Overlay("etc/hostname", b"x", executable=False),)),
}


@pytest.mark.parametrize("what", CHANGES)
def test_each_input_changes_the_digest(what: str) -> None:
    recipe = load_recipe(recipe_directory(), "standard")
    assert inputs_digest(CHANGES[what](recipe), "s", "b") != inputs_digest(recipe, "s", "b")


def test_supervisor_and_builder_are_inputs_and_the_order_of_packages_is_none() -> None:
    recipe = load_recipe(recipe_directory(), "standard")
    first = inputs_digest(recipe, "s", "b")
    assert first == inputs_digest(load_recipe(recipe_directory(), "standard"), "s", "b")
    assert len({first, inputs_digest(recipe, "t", "b"), inputs_digest(recipe, "s", "c")}) == len("abc")
    backwards = replace(recipe, variant=replace(recipe.variant, packages=recipe.variant.packages[::-1]))
    assert inputs_digest(backwards, "s", "b") == first


def test_cached_tree_depends_on_packages_and_sources_but_not_on_what_is_laid_over_it() -> None:
    debian = load_recipe(recipe_directory(), "standard").debian
    one = tree_digest(debian, ("a", "b"), install=True)
    assert one == tree_digest(debian, ("b", "a"), install=True)
    others = {
        tree_digest(debian, ("a",), install=True),
        tree_digest(debian, ("a", "b"), install=False),
        tree_digest(debian.at_mirror("http://other.example/debian"), ("a", "b"), install=True),
    }
    assert one not in others
