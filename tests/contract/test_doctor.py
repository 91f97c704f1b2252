"""`doctor` as an operator runs it, with an image and without."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import xfs
from tests.support.confined import UID
from tests.support.tiny import tiny_image

pytestmark = [pytest.mark.needs("root", "reflink", "cgroup2", "qemu", "tiny"), pytest.mark.timeout(180)]


def doctor(config: Path, *words: str) -> subprocess.CompletedProcess[str]:
    code = "from microvm_mcp.cli.main import main; main()"
    argv = [sys.executable, "-c", code, "doctor", "--config", str(config), *words]
    return subprocess.run(argv, capture_output=True, text=True, timeout=120, check=False)


def test_the_table_of_a_ready_host_names_what_the_profile_lacks_and_one_without_image_is_refused(
    tmp_path: Path,
) -> None:
    with xfs.mounted(tmp_path) as state:
        state.chmod(0o700)
        config = tmp_path / "service.toml"
        config.write_text(f'state_dir = "{state}"\nuid_base = {UID - 2_000_000_000}\nmin_free_gib = 1\n')

        without = doctor(config)
        assert without.returncode == 7, without.stdout + without.stderr
        assert f"-> microvm-mcp build-image --output {state / 'image'}" in without.stdout
        assert "not tried" in without.stdout

        image = state / "image"
        image.mkdir()
        for entry in tiny_image().iterdir():
            (image / entry.name).write_bytes(entry.read_bytes())
        ready = doctor(config, "--json")
        assert ready.returncode == 0, ready.stdout + ready.stderr
        report = json.loads(ready.stdout)
        verdicts = {check["name"]: check["verdict"] for check in report["checks"]}
        assert report["ok"] is True
        assert verdicts["image"] == verdicts["reflink"] == verdicts["vmm"] == "ok"
        assert report["profile"] == "embedded"
        assert any("jailer" in line for line in report["missing_protections"])
        assert {entry.name for entry in state.iterdir()} == {"image"}

        with (image / "vmlinuz").open("r+b") as kernel:
            kernel.write(b"\0")
        tampered = doctor(config)
        assert tampered.returncode == 7
        assert f"{image / 'vmlinuz'} does not have the digest that it should" in tampered.stdout
        assert "Traceback" not in tampered.stderr


def test_a_wrong_configuration_is_named(tmp_path: Path) -> None:
    config = tmp_path / "service.toml"
    config.write_text("nonsense = 1\n")
    done = doctor(config)
    assert done.returncode == 2
    assert "nonsense" in done.stderr
