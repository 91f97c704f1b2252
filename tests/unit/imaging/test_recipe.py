from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from microvm_mcp.imaging.errors import ImageError
from microvm_mcp.imaging.recipe import load_recipe, parse_packages, read_packages, recipe_directory

SHA256_HEX_DIGITS = 64


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    """A private copy of the recipe, to be broken."""
    return Path(shutil.copytree(recipe_directory(), tmp_path / "image"))


def replace(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


def test_package_list_drops_comments_blanks_and_repetitions() -> None:
    text = "# head\n\n  gcc  # compiler\nlibstdc++-14-dev\ngcc\npython3.13\n"
    assert parse_packages(text, "list") == ("gcc", "libstdc++-14-dev", "python3.13")


@pytest.mark.parametrize(
    "line",
    [
        "-oDir=/",
        "a",
        "Gcc",
        "gcc g++",
        "gcc=1.0",
        "gcc:amd64",
        "gcc/trixie",
        "../gcc",
        "gcc,make",
        "gcc\x00",
        "näh",
    ],
)
def test_whatever_is_no_plain_package_name_is_refused_with_its_line_and_not_echoed(line: str) -> None:
    with pytest.raises(ImageError, match=r"^Line 2 of list is no Debian package name; write one name per line.$"):
        parse_packages(f"gcc\n{line}\n", "list")


def test_unreadable_package_list_is_refused(tmp_path: Path) -> None:
    (tmp_path / "latin1.txt").write_bytes(b"gcc \xff\n")
    for name in ("absent.txt", "latin1.txt"):
        with pytest.raises(ImageError, match=name):
            read_packages(tmp_path / name)


def test_further_variant_is_the_standard_one_with_its_packages_added() -> None:
    standard = load_recipe(recipe_directory(), "standard")
    more = load_recipe(recipe_directory(), "with-go", ("golang", "gcc"))
    assert more.variant.name == "with-go"
    assert set(more.variant.packages) == {*standard.variant.packages, "golang", "gcc"}
    assert more.variant.mask == standard.variant.mask


def test_tiny_variant_takes_no_packages() -> None:
    with pytest.raises(ImageError, match="tiny variant takes no further packages"):
        load_recipe(recipe_directory(), "tiny", ("gcc",))


@pytest.mark.parametrize("name", ["", "-a", "a-", "Upper", "a/b", "..", "a" * 64, "a b", "a\n"])
def test_variant_name_outside_of_its_alphabet_is_refused(name: str) -> None:
    with pytest.raises(ImageError, match="variant's name"):
        load_recipe(recipe_directory(), name)


def test_every_download_is_pinned_by_digest_and_carries_its_version_in_its_name() -> None:
    recipe = load_recipe(recipe_directory(), "standard")
    for download in (recipe.node, recipe.pnpm):
        assert len(download.sha256) == SHA256_HEX_DIGITS
        assert download.version in download.file


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("disk_mib = 3072", "disk_mib = 0", "disk_mib must be a positive number"),
        ("disk_mib = 3072", "disk_mib = true", "disk_mib must be a positive number"),
        ("node = true", 'node = "yes"', "node must be true or false"),
        ('suite = "trixie"', "", "suite must be a text"),
        ("links = [\n", "links = [\n    [1, 2],\n", "links must be a list of pairs"),
        ("[debian]", "[debian", "recipe.toml of the image recipe cannot be read"),
    ],
)
def test_wrong_recipe_is_refused_by_the_key(recipe: Path, old: str, new: str, said: str) -> None:
    replace(recipe / "recipe.toml", old, new)
    with pytest.raises(ImageError, match=said):
        load_recipe(recipe, "standard")


def test_pin_that_is_no_digest_is_refused(recipe: Path) -> None:
    replace(recipe / "versions.toml", 'sha256 = "4', 'sha256 = "x')
    with pytest.raises(ImageError, match="no SHA-256"):
        load_recipe(recipe, "standard")


def test_overlay_script_stays_executable_where_packaging_lost_its_mode(recipe: Path) -> None:
    (recipe / "overlay/tiny/usr/lib/microvm/prepare").chmod(0o644)
    overlay = {item.path: item for item in load_recipe(recipe, "tiny").variant.overlay}
    assert overlay["usr/lib/microvm/prepare"].executable
    assert not overlay["etc/hostname"].executable


def test_mirror_replaces_both_archives_and_only_plain_addresses_are_mirrors() -> None:
    debian = load_recipe(recipe_directory(), "tiny").debian.at_mirror("https://mirror.example/debian/")
    assert debian.sources()[0].endswith("https://mirror.example/debian trixie main")
    assert debian.sources()[2].endswith("https://mirror.example/debian-security trixie-security main")
    for address in ("ftp://mirror.example", "http://user:word@mirror.example/debian", "http://a b", "http://a/\nb"):
        with pytest.raises(ImageError, match="mirror"):
            debian.at_mirror(address)


def test_image_ships_no_password_no_host_key_and_no_machine_id() -> None:
    for variant in ("standard", "tiny"):
        overlay = {item.path: item.data for item in load_recipe(recipe_directory(), variant).variant.overlay}
        assert not [
            path for path in overlay if "ssh_host" in path or path.endswith(("machine-id", "authorized_keys"))
        ]
        for line in overlay.get("etc/shadow", b"").splitlines():
            assert line.split(b":")[1] in (b"*", b"!*")
    sshd = next(
        item.data
        for item in load_recipe(recipe_directory(), "standard").variant.overlay
        if item.path == "etc/ssh/sshd_config.d/microvm.conf"
    )
    for line in (b"PasswordAuthentication no", b"PermitRootLogin no", b"AuthenticationMethods publickey"):
        assert line in sshd.splitlines()
