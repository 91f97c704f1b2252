"""The composition root: builds everything from the settings, in order, and takes it down in reverse.

The only module that names concrete drivers. Machines are recovered before any listener opens. Stopping lets go of
the machines, which run on; a second signal makes no difference, because every step of the stop is bounded.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Coroutine, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

from microvm_mcp import __version__
from microvm_mcp.config import SLOTS, Settings
from microvm_mcp.engine.context import Context, EngineSettings
from microvm_mcp.engine.fleet import Fleet
from microvm_mcp.engine.host_adapter import Layout, LinuxHost
from microvm_mcp.errors import FailedPrecondition
from microvm_mcp.host import cgroup, instance
from microvm_mcp.host.disk import NotReflinkable, probe_reflink
from microvm_mcp.imaging.errors import ImageError
from microvm_mcp.imaging.install import InstalledImage, Source, install
from microvm_mcp.link.client import LinkClient
from microvm_mcp.link.dial import dialer
from microvm_mcp.model import InstanceId
from microvm_mcp.policy import GIB, MIB, HostLimits
from microvm_mcp.service.admin import Administration
from microvm_mcp.service.call import ServiceSettings
from microvm_mcp.service.clock import SystemClock
from microvm_mcp.service.service import Service
from microvm_mcp.store.database import Database
from microvm_mcp.transport.application import build_app
from microvm_mcp.transport.doors import DoorSettings
from microvm_mcp.transport.local import LocalSocket, socket_path
from microvm_mcp.transport.server import listen, serve_http
from microvm_mcp.vmm.driver import Channel, VmmError
from microvm_mcp.vmm.qemu import probe
from microvm_mcp.vmm.qemu.driver import QemuDriver

log = logging.getLogger(__name__)

_STOP_WORKSPACE_S = 120.0
_PRUNE_EVERY_S = 3600.0
_DATABASE = "service.db"


def serve(settings: Settings) -> None:
    """Until SIGTERM or SIGINT. Raises MicrovmError for what an operator can mend."""
    _start_logging()
    try:
        asyncio.run(_serve(settings))
    except (
        instance.InstanceRefused,
        ImageError,
        NotReflinkable,
        VmmError,
        probe.NoVmm,
        cgroup.CgroupError,
    ) as error:
        raise FailedPrecondition(f"{str(error).rstrip('.')}.") from error


async def _serve(settings: Settings) -> None:
    stop = asyncio.Event()
    with _signals(stop):
        async with AsyncExitStack() as stack:
            started = time.monotonic()
            instance_id = _take_instance(settings, stack)
            image = await _image(settings)
            db = await stack.enter_async_context(await Database.open(settings.state_dir / _DATABASE))
            driver = await _driver(settings, image)
            fleet = Fleet(_context(settings, instance_id, image, db, driver))
            stack.push_async_callback(fleet.close)
            await fleet.start()
            clock = SystemClock()
            service = Service(db, fleet, _service_settings(settings), clock)
            stack.push_async_callback(service.close)
            listener = listen(settings.listen.host, settings.listen.port)
            stack.callback(listener.close)
            await stack.enter_async_context(_local_socket(settings, instance_id, db, clock, fleet))
            await stack.enter_async_context(_background("prune", _prune(fleet)))
            doors = DoorSettings(settings.host_names, frozenset(settings.allowed_origins))
            log.info(
                "serving version=%s instance=%s listen=%s:%d after_s=%.1f",
                __version__,
                instance_id,
                settings.listen.host,
                settings.listen.port,
                time.monotonic() - started,
            )
            await serve_http(build_app(service, doors), listener, stop)
            log.info("stopping; machines run on and are found again by the next start")


def _take_instance(settings: Settings, stack: AsyncExitStack) -> InstanceId:
    """Lock the state directory, then claim the host's ranges; both until the process ends."""
    if settings.instance:
        instance.expect_instance(settings.state_dir, settings.instance)
    instance.ensure_state_dir(settings.state_dir)
    stack.callback(instance.lock_state_dir(settings.state_dir).release)
    instance_id = instance.ensure_instance_id(settings.state_dir)
    mount = _cgroup_mount()
    claim = instance.Claim(instance.tag_of(instance_id), settings.uid_base, SLOTS)
    registration = instance.register(claim, cgroup_mount=mount)
    stack.callback(registration.release, cgroup_mount=mount)
    return instance_id


def _cgroup_mount() -> Path:
    mount = cgroup.find_mount()
    if mount is None:
        raise FailedPrecondition(
            "No cgroup v2 hierarchy is mounted; boot with systemd.unified_cgroup_hierarchy=1, or "
            "`mount -t cgroup2 none /sys/fs/cgroup/unified`."
        )
    return mount


async def _image(settings: Settings) -> InstalledImage:
    await probe_reflink(settings.state_dir)
    source = Source(
        settings.effective_image_dir,
        settings.kernel,
        settings.kernel_sha256,
        settings.initramfs,
        settings.initramfs_sha256,
        settings.image,
        settings.image_sha256,
    )
    image = await install(source, settings.state_dir / "images")
    log.info("image variant=%s digest=%s", image.variant, image.digest)
    return image


async def _driver(settings: Settings, image: InstalledImage) -> QemuDriver:
    found = await probe.survey(
        settings.qemu,
        settings.acceleration,
        probe.Guest(image.kernel, image.initramfs),
        cache=instance.RUN_DIR / "kvm.json",
    )
    for line in probe.weaknesses(found.capabilities):
        log.warning("embedded profile: %s", line)
    return QemuDriver(found.machine, found.capabilities)


def _context(
    settings: Settings, instance_id: InstanceId, image: InstalledImage, db: Database, driver: QemuDriver
) -> Context:
    layout = Layout(
        tag=instance.tag_of(instance_id),
        uid_base=settings.uid_base,
        machines_dir=settings.state_dir / "machines",
        jail_dir=settings.effective_jail_dir,
        cgroup_mount=_cgroup_mount(),
        root_disk=image.root_disk,
        root_disk_bytes=image.root_disk_bytes,
    )
    for directory in (layout.machines_dir, layout.jail_dir):
        instance.ensure_state_dir(directory)
    engine_settings = EngineSettings(
        limits=_limits(settings),
        slots=SLOTS,
        kernel=image.kernel,
        initramfs=image.initramfs,
        kernel_arguments=image.kernel_arguments,
        image_digest=image.digest,
        image_bytes=image.root_disk_bytes,
        keep_destroyed=settings.retention.destroyed_per_workspace,
        keep_destroyed_s=settings.retention.destroyed_hours * 3600.0,
    )
    return Context(db, driver, LinuxHost(layout), _link, time.time, engine_settings)


def _link(channel: Channel) -> LinkClient:
    return LinkClient(dialer(channel.kind, channel.path, channel.port))


def _limits(settings: Settings) -> HostLimits:
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // MIB
    volume = os.statvfs(settings.state_dir)
    return HostLimits(
        max_vms=settings.max_vms,
        max_memory_mib=settings.memory_limit_mib(memory),
        max_storage_gib=settings.storage_limit_gib(volume.f_blocks * volume.f_frsize // GIB),
        disk_reserve=settings.disk_reserve,
        free_floor_bytes=settings.min_free_gib * GIB,
    )


def _service_settings(settings: Settings) -> ServiceSettings:
    return ServiceSettings(
        calls_per_second=settings.rate_limit.calls_per_minute / 60,
        call_burst=settings.rate_limit.burst,
        max_job_seconds=settings.max_job_seconds,
        tools=settings.tools,
        default_limits=settings.workspace_defaults.as_limits(),
        receipt_hours=settings.retention.receipt_hours,
        max_receipts=settings.retention.receipts_per_workspace,
    )


@asynccontextmanager
async def _local_socket(
    settings: Settings, instance_id: InstanceId, db: Database, clock: SystemClock, fleet: Fleet
) -> AsyncIterator[None]:
    administration = Administration(
        db,
        clock,
        stop=lambda workspace: fleet.stop_workspace(workspace, wait_s=_STOP_WORKSPACE_S),
        about={
            "version": __version__,
            "instance": instance_id,
            "pid": os.getpid(),
            "state_dir": str(settings.state_dir),
        },
    )
    path = socket_path(instance.RUN_DIR, instance.tag_of(instance_id))
    local = LocalSocket(path, administration.call)
    await local.start()
    try:
        yield
    finally:
        await local.close()
        with contextlib.suppress(OSError):
            path.parent.rmdir()


@asynccontextmanager
async def _background(name: str, work: Coroutine[None, None, None]) -> AsyncIterator[None]:
    """A task for as long as the service runs; one that ends early takes the service down, with its reason."""
    async with asyncio.TaskGroup() as group:
        task = group.create_task(work, name=name)
        try:
            yield
        finally:
            task.cancel()


async def _prune(fleet: Fleet) -> None:
    """Forget what was destroyed long ago; a round that fails is logged and repeated."""
    while True:
        await asyncio.sleep(_PRUNE_EVERY_S)
        try:
            await fleet.prune()
        except Exception:
            log.exception("destroyed machines could not be forgotten")


@contextlib.contextmanager
def _signals(stop: asyncio.Event) -> Iterator[None]:
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    try:
        yield
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)


def _start_logging() -> None:
    logging.basicConfig(
        stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s"
    )
