from __future__ import annotations

from pathlib import Path

import pytest

from microvm_mcp.imaging import requirements
from microvm_mcp.imaging.errors import ImageError


@pytest.mark.needs("root")
def test_missing_programs_and_keys_are_named_with_the_command_that_brings_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(requirements, "PROGRAMS", {"no-such-program": "its-package", "tar": "tar"})
    with pytest.raises(ImageError) as refused:
        requirements.check_host("amd64", tmp_path / "keys.gpg")
    message = str(refused.value)
    assert "no-such-program" in message
    assert "apt-get install debian-archive-keyring its-package" in message


def test_image_of_another_architecture_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ImageError, match="riscv64"):
        requirements.check_host("riscv64", tmp_path)


def test_tools_get_proxies_and_certificates_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("https_proxy", "http://proxy.example:3128")
    monkeypatch.setenv("MICROVM_TOKEN_FILE", "/secret")
    environment = requirements.client_environment()
    assert environment["https_proxy"] == "http://proxy.example:3128"
    assert "MICROVM_TOKEN_FILE" not in environment
