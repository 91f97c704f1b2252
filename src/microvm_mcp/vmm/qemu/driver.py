"""The QEMU driver: one confined QEMU process per machine, behind the driver port.

Starts it with descriptors only, and finds it again after a restart of the service through the sockets in its
runtime directory. Never decides anything: no retries, no restarts, no knowledge of a machine beyond its process.
What fails here leaves neither process nor file.
"""

from __future__ import annotations

import logging
import os
import shlex
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from pathlib import Path

from microvm_mcp.host import cgroup, disk, network, process
from microvm_mcp.vmm.driver import BootSpec, Capabilities, ProcessIdentity, SnapshotPaths, VmmError
from microvm_mcp.vmm.qemu.argv import Fd, Machine, render_argv
from microvm_mcp.vmm.qemu.qmp import QmpFailed
from microvm_mcp.vmm.qemu.vmm import QemuVmm, Timeouts, Where

logger = logging.getLogger(__name__)

_LIMITS = {"NOFILE": 1024, "NPROC": 256}
"""NPROC counts the threads of the machine's own user: virtual CPUs and up to 64 workers for the disk."""
_DEVICES_MIB = 256
_MAX_SOCKET_PATH = 107


class QemuDriver:
    """Made by the composition root, from what `probe.survey` found out about the binary."""

    def __init__(self, machine: Machine, capabilities: Capabilities, timeouts: Timeouts | None = None) -> None:
        self._machine = machine
        self._capabilities = capabilities
        self._timeouts = timeouts or Timeouts()

    @property
    def capabilities(self) -> Capabilities:
        return self._capabilities

    async def boot(self, spec: BootSpec) -> QemuVmm:
        with _memory_undone(spec):
            if spec.memory_file is not None:
                spec.memory_file.unlink(missing_ok=True)
                await disk.create_sparse(spec.memory_file, spec.memory_mib << 20)
            async with self._started(spec, incoming=False) as vmm:
                await vmm.run()
        return vmm

    async def load(self, spec: BootSpec, paths: SnapshotPaths) -> QemuVmm:
        with ExitStack() as opened:
            try:
                state = _open(opened, paths.state, os.O_RDONLY)
            except OSError as error:
                raise VmmError(f"The saved device state can't be opened: {error.strerror}") from error
            _check_memory(paths.memory, spec)
            with _memory_undone(spec):
                if spec.memory_file is not None and spec.memory_file != paths.memory:
                    spec.memory_file.unlink(missing_ok=True)
                    await _copy_memory(paths.memory, spec.memory_file)
                async with self._started(spec, incoming=True) as vmm:
                    await vmm.load(state)
        return vmm

    async def adopt(self, spec: BootSpec, identity: ProcessIdentity) -> QemuVmm | None:
        where = Where.below(spec.runtime_dir)
        held = process.adopt(identity.pid, identity.started_ticks, where.output)
        if held is None:
            return None
        if identity.pid not in cgroup.pids(spec.cgroup):
            # Pid and start time are from the row; the cgroup is the kernel's word on whose process this is.
            held.close()
            return None
        vmm = QemuVmm(spec, where, held, self._timeouts)
        try:
            await vmm.connect(self._timeouts.adopt_s)
        except QmpFailed as error:
            await vmm.close()
            if held.is_dead:
                return None
            raise VmmError(f"The VMM lives and does not answer: {error}") from error
        except BaseException:
            await vmm.close()
            raise
        return vmm

    @asynccontextmanager
    async def _started(self, spec: BootSpec, *, incoming: bool) -> AsyncIterator[QemuVmm]:
        """A VMM with stopped CPUs that answers; what goes wrong from here on ends it and tells its last words."""
        where = Where.below(spec.runtime_dir)
        argv = render_argv(spec, self._machine, incoming=incoming)
        try:
            held = await self._launch(spec, where, argv)
        except (process.LaunchFailed, OSError) as error:
            where.remove()
            raise VmmError(f"QEMU can't be started: {error}", evidence=shlex.join(argv)) from error
        except BaseException:
            where.remove()
            raise
        vmm = QemuVmm(spec, where, held, self._timeouts)
        try:
            await vmm.connect(self._timeouts.greeting_s)
            yield vmm
        except (QmpFailed, VmmError) as error:
            await vmm.kill()
            status = await held.wait()
            evidence = f"argv: {shlex.join(argv)}\nexit status: {status}\noutput: {held.output().strip()}"
            raise VmmError(f"QEMU did not come up: {error}", evidence=evidence) from error
        except BaseException:
            vmm.kill_at_once()
            raise

    async def _launch(self, spec: BootSpec, where: Where, argv: tuple[str, ...]) -> process.Process:
        with ExitStack() as opened:
            descriptors: dict[int, int] = {
                Fd.DISK: _open(opened, spec.disk, os.O_RDWR),
                Fd.KERNEL: _open_readable(opened, spec.kernel),
                Fd.INITRAMFS: _open_readable(opened, spec.initramfs),
                Fd.QMP: _listen(opened, where.qmp),
                Fd.CONTROL: _listen(opened, where.control),
            }
            if spec.memory_file is not None:
                descriptors[Fd.MEMORY] = _open(opened, spec.memory_file, os.O_RDWR)
                # QEMU opens it anew, which asks for the file's own permission and for no directory's.
                os.fchown(descriptors[Fd.MEMORY], spec.uid, spec.gid)
            plan = process.Plan(
                argv=argv,
                uid=spec.uid,
                gid=spec.gid,
                output=where.output,
                cgroup=spec.cgroup,
                netns=network.path(spec.netns),
                tap=process.Tap(spec.tap, Fd.TAP),
                descriptors=descriptors,
                private_devices=("/dev/kvm",) if self._machine.accelerator == "kvm" else (),
                limits={**_LIMITS, "FSIZE": _largest_file(spec, descriptors[Fd.DISK])},
            )
            return await process.launch(plan, timeout_s=self._timeouts.launch_s)


@contextmanager
def _memory_undone(spec: BootSpec) -> Iterator[None]:
    """Removes the memory file if what follows fails."""
    try:
        yield
    except BaseException:
        if spec.memory_file is not None:
            spec.memory_file.unlink(missing_ok=True)
        raise


def _check_memory(saved: Path, spec: BootSpec) -> None:
    expected = 0 if spec.memory_file is None else spec.memory_mib << 20
    try:
        if disk.size_bytes(saved) != expected:
            raise VmmError("The saved memory does not have the size of this machine's memory")
    except OSError as error:
        raise VmmError(f"The saved memory can't be opened: {error.strerror}") from error


async def _copy_memory(source: Path, target: Path) -> None:
    """A private copy, so that the snapshot stays what it was whatever the machine does with its memory."""
    try:
        await disk.clone(source, target)
    except OSError as error:
        raise VmmError(f"The saved memory can't be copied: {error.strerror}") from error
    except disk.NotReflinkable as error:
        raise VmmError(f"The saved memory can't be copied: {error}") from error


def _open(opened: ExitStack, path: Path, flags: int) -> int:
    fd = os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC)
    opened.callback(os.close, fd)
    return fd


def _open_readable(opened: ExitStack, path: Path) -> int:
    """Kernel and initramfs are no secrets, and QEMU opens them anew as a user that owns nothing."""
    fd = _open(opened, path, os.O_RDONLY)
    if not os.fstat(fd).st_mode & 0o004:
        raise VmmError(f"{path.name} must be readable for the VMM's user: chmod 0644 {path}")
    return fd


def _largest_file(spec: BootSpec, disk_fd: int) -> int:
    """A VMM that was taken over holds its disk for writing: without a limit it could fill the host's volume.

    Saved state, which QEMU writes as well, is at most the memory and the devices.
    """
    return max(os.fstat(disk_fd).st_size, (spec.memory_mib + _DEVICES_MIB) << 20)


def _listen(opened: ExitStack, path: Path) -> int:
    if len(os.fsencode(path)) > _MAX_SOCKET_PATH:
        raise VmmError(f"A Unix socket's path has at most {_MAX_SOCKET_PATH} bytes: use a shorter jail_dir")
    path.unlink(missing_ok=True)
    listener = opened.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
    listener.bind(str(path))
    path.chmod(0o600)
    listener.listen(8)
    return listener.fileno()
