"""One live QEMU process, steered over QMP.

A guest that ends by itself stays stopped inside QEMU (see `argv`): the watcher then reads why from the event and
from the guest's console, remembers it for `wait_exit`, and tells QEMU to quit. So the reason is known whether or
not the service was there when it happened. The watcher ends with the process; `close` lets go of both.
"""

from __future__ import annotations

import asyncio
import base64
import logging
import os
import signal
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

from microvm_mcp.host import cgroup, disk, process
from microvm_mcp.vmm.driver import BootSpec, Channel, ExitInfo, ProcessIdentity, SnapshotPaths, VmmError
from microvm_mcp.vmm.qemu.argv import CONSOLE_BYTES
from microvm_mcp.vmm.qemu.qmp import Qmp, QmpFailed

logger = logging.getLogger(__name__)

_PANIC = "Kernel panic - not syncing"
_TAIL_CHARACTERS = 8192
_MAX_NEWS = 16
"""Of a migration, kept for whoever waits: the newest, since the last one tells its end."""


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Seconds. Generous: they bound what is broken, not what is slow."""

    launch_s: float = 20.0
    greeting_s: float = 60.0
    """QEMU before its first word; many that start at once on few cores take many times one's time."""
    adopt_s: float = 10.0
    command_s: float = 30.0
    migrate_s: float = 300.0
    kill_s: float = 30.0


@dataclass(frozen=True, slots=True)
class Where:
    """Files of one VMM in its runtime directory, which only root can enter."""

    qmp: Path
    control: Path
    output: Path

    @classmethod
    def below(cls, runtime_dir: Path) -> Where:
        return cls(runtime_dir / "qmp.sock", runtime_dir / "control.sock", runtime_dir / "output")

    def remove(self) -> None:
        for path in (self.qmp, self.control, self.output):
            path.unlink(missing_ok=True)


class QemuVmm:
    """Made by the driver. `connect` comes first."""

    def __init__(self, spec: BootSpec, where: Where, held: process.Process, timeouts: Timeouts) -> None:
        self._spec = spec
        self._where = where
        self._process = held
        self._timeouts = timeouts
        self._connection: Qmp | None = None
        self._watcher: asyncio.Task[None] | None = None
        self._migrations: asyncio.Queue[str] = asyncio.Queue(_MAX_NEWS)
        self._last_words = ""
        self._guest_shutdown = False
        self._guest_panicked = False

    @property
    def identity(self) -> ProcessIdentity:
        return ProcessIdentity(self._process.pid, self._process.started_ticks)

    @property
    def channel(self) -> Channel:
        return Channel("unix", self._where.control)

    async def connect(self, timeout_s: float) -> None:
        """QmpFailed if it ends before it answers, or does not answer in time."""
        greeting = asyncio.create_task(Qmp.connect(self._where.qmp, timeout_s=timeout_s))
        death = asyncio.create_task(self._process.wait())
        try:
            await asyncio.wait((greeting, death), return_when=asyncio.FIRST_COMPLETED)
            if not greeting.done():
                raise QmpFailed("it ended before it was up")
            qmp = await greeting
        finally:
            for task in (greeting, death):
                task.cancel()
            await asyncio.gather(greeting, death, return_exceptions=True)
        self._connection = qmp
        status = await self._status()
        self._watcher = asyncio.create_task(self._watch(qmp, status), name=f"watch {self._spec.unit}")

    async def run(self) -> None:
        await self._execute("cont")

    async def pause(self) -> None:
        await self._execute("stop")
        status = await self._status_or_refuse()
        if status not in ("paused", "postmigrate"):
            raise VmmError(f"The machine can't be paused: it is {status}")

    async def load(self, state: int) -> None:
        """Loads device state from a descriptor into a QEMU that waits for it; the CPUs stay stopped."""
        await self._prepare_migration()
        await self._give("state", state)
        await self._migrate("migrate-incoming", "fd:state")
        status = await self._status_or_refuse()
        if status != "paused":
            raise VmmError(f"The saved state was not taken: the machine is {status}")

    async def snapshot(self, paths: SnapshotPaths) -> None:
        status = await self._status_or_refuse()
        if status != "paused":
            raise VmmError(f"Only a paused machine can be saved: it is {status}")
        with ExitStack() as undo:
            try:
                await self._prepare_migration()
                await self._save_devices(paths.state, undo)
                if self._spec.memory_file is not None:
                    await disk.clone(self._spec.memory_file, paths.memory)
                else:
                    # The memory is in the stream then; an empty file makes the pair complete all the same.
                    await disk.create_sparse(paths.memory, 0)
                undo.callback(paths.memory.unlink)
                for path in (paths.state, paths.memory, *{paths.state.parent, paths.memory.parent}):
                    await disk.sync(path)
            except (OSError, disk.NotReflinkable) as error:
                raise VmmError(f"The machine can't be saved: {error}") from error
            undo.pop_all()

    async def _save_devices(self, path: Path, undo: ExitStack) -> None:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        undo.callback(path.unlink)
        try:
            await self._give("state", fd)
        finally:
            os.close(fd)
        await self._migrate("migrate", "fd:state")

    async def request_shutdown(self) -> None:
        """Ctrl-Alt-Del where there is a keyboard, else the power button."""
        keys = [{"type": "qcode", "data": key} for key in ("ctrl", "alt", "delete")]
        try:
            await self._execute("send-key", {"keys": keys})
        except VmmError:
            await self._execute("system_powerdown")

    async def kill(self) -> None:
        self.kill_at_once()
        try:
            await cgroup.kill(self._spec.cgroup, timeout_s=self._timeouts.kill_s)
            async with asyncio.timeout(self._timeouts.kill_s):
                await self._process.wait()
        except (TimeoutError, cgroup.CgroupError) as error:
            raise VmmError(f"The VMM can't be killed: {error}") from error
        if self._watcher is not None:
            await asyncio.wait((self._watcher,))
        elif self._connection is not None:
            await self._connection.close()

    def kill_at_once(self) -> None:
        """What can be done without waiting: the signal, and no name left for anyone to connect to."""
        self._process.signal(signal.SIGKILL)
        self._where.remove()

    async def wait_exit(self) -> ExitInfo:
        status = await self._process.wait()
        said = self._process.output()
        if self._last_words:
            said = f"{said}\nconsole:\n{self._last_words}"
        return ExitInfo(status, said[-_TAIL_CHARACTERS:], self._guest_shutdown, self._guest_panicked)

    async def close(self) -> None:
        if self._watcher is not None:
            self._watcher.cancel()
            await asyncio.wait((self._watcher,))
        if self._connection is not None:
            await self._connection.close()
        self._process.close()

    async def _watch(self, qmp: Qmp, status: str) -> None:
        death = asyncio.create_task(self._process.wait())
        try:
            if status in ("shutdown", "guest-panicked"):
                # It ended while nobody watched.
                await self._conclude(qmp, panicked=status == "guest-panicked", by_reset=True)
            while not death.done():
                event = asyncio.create_task(qmp.next_event())
                await asyncio.wait((event, death), return_when=asyncio.FIRST_COMPLETED)
                if not event.done():
                    event.cancel()
                    await asyncio.wait((event,))
                    break
                name, data = event.result()
                if name == "MIGRATION":
                    if self._migrations.full():
                        self._migrations.get_nowait()
                    self._migrations.put_nowait(str(data.get("status")))
                elif name == "GUEST_PANICKED":
                    await self._conclude(qmp, panicked=True)
                elif name == "SHUTDOWN" and data.get("guest") is True:
                    await self._conclude(qmp, panicked=False, by_reset=data.get("reason") == "guest-reset")
        finally:
            death.cancel()
        await qmp.close()
        self._where.remove()

    async def _conclude(self, qmp: Qmp, *, panicked: bool, by_reset: bool = False) -> None:
        """Reads the guest's last words, then ends the process that kept them."""
        try:
            answer = await qmp.execute(
                "ringbuf-read",
                {"device": "console", "size": CONSOLE_BYTES, "format": "base64"},
                timeout_s=self._timeouts.command_s,
            )
            self._last_words = base64.b64decode(str(answer)).decode("utf-8", "replace")[-_TAIL_CHARACTERS:]
        except (QmpFailed, ValueError) as error:
            logger.warning("no last words unit=%s error=%s", self._spec.unit, error)
        # Without the notifier's driver in the guest a panic is a reset, as `panic=-1` asks; the console tells.
        self._guest_panicked = panicked or (by_reset and _PANIC in self._last_words)
        self._guest_shutdown = not self._guest_panicked
        logger.info("guest ended unit=%s panicked=%s", self._spec.unit, self._guest_panicked)
        with suppress(QmpFailed, TimeoutError):
            await qmp.execute("quit", timeout_s=self._timeouts.command_s)
            async with asyncio.timeout(self._timeouts.command_s):
                await self._process.wait()
        self._process.signal(signal.SIGKILL)

    async def _prepare_migration(self) -> None:
        capabilities = [
            {"capability": "events", "state": True},
            # Memory that lives in a shared file needs no writing out.
            {"capability": "x-ignore-shared", "state": self._spec.memory_file is not None},
        ]
        await self._execute("migrate-set-capabilities", {"capabilities": capabilities})
        # The default of 128 MiB/s is for networks.
        await self._execute("migrate-set-parameters", {"max-bandwidth": 16 << 30})

    async def _migrate(self, command: str, uri: str) -> None:
        while not self._migrations.empty():
            self._migrations.get_nowait()
        await self._execute(command, {"uri": uri})
        death = asyncio.create_task(self._process.wait())
        try:
            async with asyncio.timeout(self._timeouts.migrate_s):
                await self._until_migrated(command, death)
        except TimeoutError as error:
            raise VmmError(f"{command}: no end after {self._timeouts.migrate_s:g} s") from error
        finally:
            death.cancel()

    async def _until_migrated(self, command: str, death: asyncio.Task[int | None]) -> None:
        while True:
            news = asyncio.create_task(self._migrations.get())
            try:
                await asyncio.wait((news, death), return_when=asyncio.FIRST_COMPLETED)
                if not news.done():
                    raise VmmError(f"{command}: QEMU ended")
            finally:
                news.cancel()
            status = news.result()
            if status == "completed":
                return
            if status in ("failed", "cancelled"):
                raise VmmError(f"{command}: {status}")

    async def _give(self, name: str, fd: int) -> None:
        try:
            await self._qmp().give(name, fd, timeout_s=self._timeouts.command_s)
        except QmpFailed as error:
            raise VmmError(str(error)) from error

    async def _execute(self, command: str, arguments: dict[str, object] | None = None) -> object:
        try:
            return await self._qmp().execute(command, arguments, timeout_s=self._timeouts.command_s)
        except QmpFailed as error:
            raise VmmError(str(error)) from error

    async def _status(self) -> str:
        return await self._qmp().query("query-status", "status", timeout_s=self._timeouts.command_s)

    async def _status_or_refuse(self) -> str:
        try:
            return await self._status()
        except QmpFailed as error:
            raise VmmError(str(error)) from error

    def _qmp(self) -> Qmp:
        if self._connection is None:
            raise VmmError("QEMU is not connected")
        return self._connection
