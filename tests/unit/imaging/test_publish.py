from __future__ import annotations

import asyncio
import fcntl
import os
from pathlib import Path

import pytest

from microvm_mcp.imaging.errors import ImageError
from microvm_mcp.imaging.manifest import MANIFEST
from microvm_mcp.imaging.progress import Silent
from microvm_mcp.imaging.publish import check_output, exclusive, publish, work_directory


def make(directory: Path, content: str) -> Path:
    directory.mkdir()
    (directory / MANIFEST).write_text(content)
    return directory


@pytest.mark.parametrize("before", ["absent", "empty", "image"])
def test_output_is_the_new_image_and_nothing_else_is_left(tmp_path: Path, before: str) -> None:
    output = tmp_path / "images" / "out"
    if before != "absent":
        output.mkdir(parents=True)
    if before == "image":
        (output / MANIFEST).write_text("old")
        (output / "of-the-old-one").touch()
    with work_directory(output) as work:
        publish(make(work / "image", "new"), output)
    assert (output / MANIFEST).read_text() == "new"
    assert [path.name for path in output.iterdir()] == [MANIFEST]
    assert [path.name for path in output.parent.iterdir()] == ["out"]


def test_reader_of_the_old_image_keeps_what_it_opened(tmp_path: Path) -> None:
    output = make(tmp_path / "out", "old")
    with (output / MANIFEST).open() as reader:
        with work_directory(output) as work:
            publish(make(work / "image", "new"), output)
        assert reader.read() == "old"


def test_failure_leaves_the_output_as_it_was_and_no_work_directory(tmp_path: Path) -> None:
    output = make(tmp_path / "out", "old")

    def interrupted() -> None:
        with work_directory(output) as work:
            make(work / "image", "half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert (output / MANIFEST).read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_leavings_of_a_killed_build_go_and_those_of_a_live_one_stay(tmp_path: Path) -> None:
    dead = make(tmp_path / ".out.partial-dead", "half")
    live = make(tmp_path / ".out.partial-live", "half")
    other = make(tmp_path / ".other.partial-x", "half")
    held = os.open(live, os.O_RDONLY)
    try:
        fcntl.flock(held, fcntl.LOCK_EX)
        with work_directory(tmp_path / "out"):
            assert not dead.exists()
            assert live.exists()
            assert other.exists()
    finally:
        os.close(held)


def test_link_in_place_of_leavings_is_not_followed(tmp_path: Path) -> None:
    target = make(tmp_path / "precious", "mine")
    (tmp_path / ".out.partial-link").symlink_to(target)
    with work_directory(tmp_path / "out"):
        pass
    assert (target / MANIFEST).read_text() == "mine"


def test_only_an_image_or_nothing_may_be_replaced(tmp_path: Path) -> None:
    check_output(tmp_path / "absent")
    (tmp_path / "empty").mkdir()
    check_output(tmp_path / "empty")
    check_output(make(tmp_path / "image", "old"))
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "letter.txt").touch()
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to("image")
    for name in ("home", "file", "link"):
        with pytest.raises(ImageError, match="output"):
            check_output(tmp_path / name)


async def test_second_build_waits_for_the_first(tmp_path: Path) -> None:
    lock = tmp_path / "lock"
    order: list[str] = []

    async def second() -> None:
        async with exclusive(lock, Silent()):
            order.append("second")

    async with exclusive(lock, Silent()):
        waiting = asyncio.create_task(second())
        await asyncio.sleep(0)
        order.append("first")
    async with asyncio.timeout(10):
        await waiting
    assert order == ["first", "second"]
