"""Builds an image, from the recipe to a published directory.

The stages run in order, each on what the ones before left in the work directory or the cache. A build whose inputs
are those of the image already there does nothing. Whatever ends a build early, the output is what it was before.
"""

from __future__ import annotations

import hashlib
import shutil
import time
from dataclasses import dataclass, replace
from pathlib import Path

from microvm_mcp import __version__
from microvm_mcp.host.command import CommandFailed, run
from microvm_mcp.imaging import manifest as m
from microvm_mcp.imaging.bzimage import parse_payload
from microvm_mcp.imaging.cache import Cache, remove
from microvm_mcp.imaging.debian import fetch_tree, read_package_versions, unpack_tree
from microvm_mcp.imaging.disk import make_disk
from microvm_mcp.imaging.errors import ImageError
from microvm_mcp.imaging.initramfs import build_initramfs
from microvm_mcp.imaging.inputs import inputs_digest
from microvm_mcp.imaging.node import fetch_node, fetch_pnpm, install_node
from microvm_mcp.imaging.progress import Progress
from microvm_mcp.imaging.publish import check_output, exclusive, publish, work_directory
from microvm_mcp.imaging.recipe import Recipe, load_recipe, read_packages, recipe_directory
from microvm_mcp.imaging.requirements import check_host
from microvm_mcp.imaging.supervisor import Supervisor, build_supervisor
from microvm_mcp.imaging.tree import finish_tree
from microvm_mcp.wire.messages import WIRE_VERSION

DEFAULT_CACHE = Path("/var/cache/microvm-mcp/images")
_PACKAGE = Path(__file__).resolve().parent.parent
_MIN_FREE_BYTES = 4 << 30
_KERNEL_PARTS = ("./boot/vmlinuz-*", "./usr/lib/modules/*", "./usr/bin/busybox", "./.microvm-packages")


@dataclass(frozen=True, slots=True)
class Request:
    output: Path
    variant: str = "standard"
    packages: Path | None = None
    mirror: str | None = None
    cache: Path = DEFAULT_CACHE
    refresh: bool = False
    """Build although the inputs are the same, and take no package tree from the cache."""


@dataclass(frozen=True, slots=True)
class Built:
    manifest: m.Manifest
    up_to_date: bool
    """Nothing was built: the image there is of the same inputs."""


@dataclass(frozen=True, slots=True)
class _Parts:
    """What the download stages leave in the cache."""

    kernel: Path
    root: Path
    node: tuple[Path, Path] | None


async def build_image(request: Request, progress: Progress) -> Built:
    extra = read_packages(request.packages) if request.packages else ()
    recipe = load_recipe(recipe_directory(), request.variant, extra)
    if request.mirror is not None:
        recipe = replace(recipe, debian=recipe.debian.at_mirror(request.mirror))
    supervisor = build_supervisor(_PACKAGE)
    digest = inputs_digest(recipe, supervisor.sha256, builder_digest())
    output = request.output.absolute()
    check_output(output)
    if not request.refresh and (present := _present(output, digest)):
        return Built(present, up_to_date=True)
    check_host(recipe.debian.architecture, recipe.debian.keyring)
    cache = Cache(request.cache.absolute())
    cache.directory.mkdir(mode=0o755, parents=True, exist_ok=True)
    try:
        async with exclusive(cache.directory / "lock", progress):
            cache.prepare()
            with work_directory(output) as work:
                _check_space(work)
                made = await _build(recipe, supervisor, digest, cache, work, progress, fresh=request.refresh)
                publish(work / "image", output)
    except CommandFailed as error:
        raise ImageError(f"{_program(error)} failed ({error.reason}): {error.tail or 'it said nothing'}") from error
    return Built(made, up_to_date=False)


async def _build(
    recipe: Recipe,
    supervisor: Supervisor,
    digest: str,
    cache: Cache,
    work: Path,
    progress: Progress,
    *,
    fresh: bool,
) -> m.Manifest:
    parts = await _fetch(recipe, cache, progress, fresh=fresh)
    image = work / "image"
    image.mkdir()

    progress.stage("Kernel and initramfs")
    kernel_tree = work / "kernel"
    kernel_tree.mkdir()
    await unpack_tree(parts.kernel, kernel_tree, only=_KERNEL_PARTS)
    version = await _make_kernel(kernel_tree, recipe, image)
    packages = _kernel_package(kernel_tree, version)

    progress.stage("Root file system")
    tree = work / "tree"
    tree.mkdir()
    await unpack_tree(parts.root, tree)
    packages |= read_package_versions(tree)
    if recipe.variant.install:
        (kernel_tree / "usr/lib/modules" / version).rename(_made(tree / "usr/lib/modules") / version)
        await run(["chroot", tree, "/usr/sbin/depmod", version], timeout_s=120)
    if parts.node:
        install_node(*parts.node, _made(tree / "usr/local"))
        packages |= {item.package: item.version for item in (recipe.node, recipe.pnpm)}
    await finish_tree(tree, recipe.variant, supervisor)

    progress.stage("Disk")
    shape = recipe.variant
    await make_disk(
        tree,
        image / m.ROOT_DISK,
        size_mib=shape.disk_mib,
        bytes_per_inode=shape.bytes_per_inode,
        inputs_digest=digest,
    )
    remove(tree)

    progress.stage("Digests")
    manifest = m.Manifest(
        schema=m.SCHEMA,
        variant=shape.name,
        architecture=recipe.debian.architecture,
        built_at=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        inputs_digest=digest,
        kernel_version=version,
        kernel_arguments=m.KERNEL_ARGUMENTS,
        wire_version=WIRE_VERSION,
        supervisor_version=__version__,
        supervisor_sha256=supervisor.sha256,
        files={name: m.record_file(image / name) for name in m.FILES},
        packages=packages,
    )
    (image / m.MANIFEST).write_bytes(m.render_manifest(manifest))
    return manifest


async def _fetch(recipe: Recipe, cache: Cache, progress: Progress, *, fresh: bool) -> _Parts:
    debian, variant = recipe.debian, recipe.variant
    progress.stage("Kernel package")
    kernel = await fetch_tree(
        cache, "kernel", debian, recipe.kernel_packages, install=False, fresh=fresh, progress=progress
    )
    progress.stage("Debian packages")
    root = await fetch_tree(
        cache, variant.name, debian, variant.packages, install=variant.install, fresh=fresh, progress=progress
    )
    if not variant.node:
        return _Parts(kernel, root, None)
    progress.stage("Node")
    wheel = await fetch_node(cache, recipe.node, progress)
    return _Parts(kernel, root, (wheel, await fetch_pnpm(cache, recipe.pnpm, wheel, progress)))


async def _make_kernel(tree: Path, recipe: Recipe, image: Path) -> str:
    """The kernel's two forms and the initramfs; returns the kernel's version."""
    kernels = sorted((tree / "boot").glob("vmlinuz-*"))
    if len(kernels) != 1:
        raise ImageError(f"The kernel packages brought {len(kernels)} kernels; list exactly one in the recipe.")
    version = kernels[0].name.removeprefix("vmlinuz-")
    bzimage = kernels[0].read_bytes()
    (image / m.KERNEL).write_bytes(bzimage)
    payload = parse_payload(bzimage)
    elf = image / m.KERNEL_ELF
    unpacked = await run(
        ["zstd", "--decompress", "--quiet", "--stdout"],
        input=payload.compressed,
        timeout_s=60,
        max_output_bytes=payload.unpacked_size,
    )
    if len(unpacked.stdout) != payload.unpacked_size or not unpacked.stdout.startswith(b"\x7fELF"):
        raise ImageError("The kernel's payload is not the ELF file that it says it is; fetch the kernel again.")
    elf.write_bytes(unpacked.stdout)
    modules = tree / "usr/lib/modules" / version
    busybox = (tree / "usr/bin/busybox").read_bytes()
    (image / m.INITRAMFS).write_bytes(build_initramfs(modules, recipe.kernel_modules, busybox, recipe.init))
    for name in (m.KERNEL, m.KERNEL_ELF, m.INITRAMFS):
        (image / name).chmod(0o644)
    return version


def _kernel_package(tree: Path, version: str) -> dict[str, str]:
    """Of what was unpacked for the kernel only it and the initramfs' busybox end up in the image."""
    wanted = (f"linux-image-{version}", "busybox-static")
    return {name: text for name, text in read_package_versions(tree).items() if name in wanted}


def _present(output: Path, digest: str) -> m.Manifest | None:
    try:
        manifest = m.read_manifest(output)
    except ImageError:
        return None
    return manifest if manifest.inputs_digest == digest and m.same_sizes(output, manifest) else None


def builder_digest() -> str:
    digest = hashlib.sha256()
    for path in sorted((_PACKAGE / "imaging").glob("*.py")):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def _check_space(work: Path) -> None:
    free = shutil.disk_usage(work).free
    if free < _MIN_FREE_BYTES:
        raise ImageError(
            f"Building needs {_MIN_FREE_BYTES >> 30} GiB of free space beside the output and"
            f" {free >> 20} MiB are free; make room or choose another --output."
        )


def _made(path: Path) -> Path:
    path.mkdir(mode=0o755, parents=True, exist_ok=True)
    return path


def _program(error: CommandFailed) -> str:
    """The command that did the work, behind the wrapper that it runs in."""
    words = error.argv[error.argv.index("--") + 1 :] if "--" in error.argv else error.argv
    return Path(words[0]).name
