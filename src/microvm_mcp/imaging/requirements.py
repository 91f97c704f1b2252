"""What the builder needs of the host, checked before it starts, with the command that mends what is missing."""

from __future__ import annotations

import os
import platform
import shutil
from collections.abc import Mapping
from pathlib import Path

from microvm_mcp.imaging.errors import ImageError

PROGRAMS: Mapping[str, str] = {
    "apt-get": "apt",
    "chroot": "coreutils",
    "debugfs": "e2fsprogs",
    "dpkg-deb": "dpkg",
    "mke2fs": "e2fsprogs",
    "mmdebstrap": "mmdebstrap",
    "tar": "tar",
    "unshare": "util-linux",
    "zstd": "zstd",
}
"""Program: the Debian and Ubuntu package that brings it."""

_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_MACHINES: Mapping[str, str] = {"amd64": "x86_64"}

_PASSED_ON = (
    *("http_proxy", "https_proxy", "no_proxy", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY"),
    *("SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "NODE_EXTRA_CA_CERTS"),
    *("PIP_CERT", "PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "PIP_CONFIG_FILE", "PIP_DEFAULT_TIMEOUT", "HOME"),
)


def check_host(architecture: str, keyring: Path) -> None:
    machine = platform.machine()
    if _MACHINES.get(architecture) != machine:
        raise ImageError(
            f"The image is for {architecture} and this host is {machine}; build it on a 64-bit x86 host."
        )
    if os.geteuid() != 0:
        raise ImageError("Building an image needs root, for owners and device files; run it as root.")
    missing = {
        program: package for program, package in PROGRAMS.items() if shutil.which(program, path=_PATH) is None
    }
    packages = set(missing.values())
    names = sorted(missing)
    if not keyring.is_file():
        names.append(str(keyring))
        packages.add("debian-archive-keyring")
    if names:
        raise ImageError(f"This host lacks {', '.join(names)}; run: apt-get install {' '.join(sorted(packages))}")


def client_environment() -> dict[str, str]:
    """What apt, pip and npm take from the operator's environment: proxies, certificates, their own settings."""
    return {name: os.environ[name] for name in _PASSED_ON if name in os.environ}
