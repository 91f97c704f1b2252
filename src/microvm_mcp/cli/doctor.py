"""`microvm-mcp doctor`: what this host can do for the service, row by row, and what the profile lacks."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from microvm_mcp.errors import FailedPrecondition

if TYPE_CHECKING:
    from microvm_mcp.config import Settings
    from microvm_mcp.host.preflight import Check
    from microvm_mcp.vmm.preflight import Report


def doctor(
    config: Annotated[
        Path | None,
        typer.Option("--config", metavar="FILE", help="The configuration to check for; without it the defaults."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")] = False,
) -> None:
    """Check this host: every row is tried, and what can't work comes with the command that mends it.

    Exits with 7 if anything is refused. Changes nothing, but remembers whether KVM boots a guest.
    """
    from microvm_mcp.config import Settings, load_settings
    from microvm_mcp.host import preflight

    settings = Settings() if config is None else load_settings(config)
    checks, report = asyncio.run(_examine(settings))
    failed = preflight.refused(checks)
    if as_json:
        document = {
            "ok": not failed,
            "checks": preflight.documents(checks),
            "profile": "embedded",
            "missing_protections": list(report.weaknesses),
        }
        typer.echo(json.dumps(document, indent=1))
    else:
        typer.echo(preflight.render(checks))
        if report.weaknesses:
            typer.echo("\nThe embedded profile lacks, compared with production:")
        for line in report.weaknesses:
            typer.echo(f"  * {line}")
        typer.echo("\nRefused: the service would not start or not work." if failed else "\nNothing is in the way.")
    if failed:
        raise typer.Exit(FailedPrecondition.exit_status)


async def _examine(settings: Settings) -> tuple[tuple[Check, ...], Report]:
    from microvm_mcp.config import SLOTS
    from microvm_mcp.host import preflight
    from microvm_mcp.host.instance import RUN_DIR
    from microvm_mcp.imaging.manifest import INITRAMFS, KERNEL
    from microvm_mcp.vmm import preflight as vmm_preflight

    images = settings.effective_image_dir
    wanted = preflight.Wanted(
        state_dir=settings.state_dir,
        jail_dir=settings.effective_jail_dir,
        image_dir=images,
        uid_base=settings.uid_base,
        uid_count=SLOTS,
        min_free_bytes=settings.min_free_gib << 30,
    )
    host = await preflight.survey(wanted)
    image = await asyncio.to_thread(_image, settings)
    report = await vmm_preflight.survey(
        settings.qemu,
        settings.acceleration,
        kernel=settings.kernel or images / KERNEL,
        initramfs=settings.initramfs or images / INITRAMFS,
        # Where `serve` keeps it: whether KVM works is a fact about the host, the same for all instances.
        cache=RUN_DIR / "kvm.json" if await asyncio.to_thread(RUN_DIR.is_dir) else None,
    )
    return (*host, image, *report.checks), report


def _image(settings: Settings) -> Check:
    """Whether the files are what the configuration, or else their manifest, says they are."""
    from microvm_mcp.host.digest import sha256_file
    from microvm_mcp.host.preflight import Check, Verdict
    from microvm_mcp.imaging.errors import ImageError
    from microvm_mcp.imaging.manifest import INITRAMFS, KERNEL, ROOT_DISK, read_manifest

    images = settings.effective_image_dir
    build = f"microvm-mcp build-image --output {images}"
    try:
        manifest = read_manifest(images)
        for name, path, expected in (
            (KERNEL, settings.kernel, settings.kernel_sha256),
            (INITRAMFS, settings.initramfs, settings.initramfs_sha256),
            (ROOT_DISK, settings.image, settings.image_sha256),
        ):
            file = path or images / name
            if sha256_file(file) != (expected or manifest.files[name].sha256):
                return Check("image", Verdict.REFUSED, f"{file} does not have the digest that it should", build)
    except (ImageError, OSError) as error:
        return Check("image", Verdict.REFUSED, f"{images}: {getattr(error, 'strerror', None) or error}", build)
    return Check("image", Verdict.OK, f"{manifest.variant}, Linux {manifest.kernel_version}, digests match")
