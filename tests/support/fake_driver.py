"""A driver without a VMM: a small real process per machine, stopped and continued by signals.

It passes `tests/contract/driver_suite.py` like the real ones, so a test that uses it stands on the port's promises.
It needs no root: namespaces, cgroup, kernel and disk of the spec are not touched, only the disk must exist.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
from pathlib import Path

from microvm_mcp.host import process
from microvm_mcp.vmm.driver import (
    BootSpec,
    Capabilities,
    Channel,
    ExitInfo,
    ProcessIdentity,
    SnapshotPaths,
    VmmError,
)

SCRIPT = Path(__file__).with_name("fake_vmm.py")
_POLL_S = 0.002


class FakeDriver:
    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(
            name="fake",
            hardware_virtualisation=False,
            snapshot=True,
            jail=False,
            machine_type="fake",
            vmm_version="0",
            vmm_digest="0" * 64,
        )

    async def boot(self, spec: BootSpec) -> FakeVmm:
        vmm = await self._start(spec, secrets.token_hex(8))
        _write_memory(spec.memory_file, spec.memory_mib)
        await vmm.run()
        return vmm

    async def load(self, spec: BootSpec, paths: SnapshotPaths) -> FakeVmm:
        try:
            state = json.loads(paths.state.read_text())
            size = paths.memory.stat().st_size
            boot_id = str(state["boot_id"])
        except (OSError, ValueError, KeyError) as error:
            raise VmmError("The saved state can't be loaded") from error
        if size != spec.memory_mib << 20:
            raise VmmError("The saved memory has another size")
        vmm = await self._start(spec, boot_id)
        _write_memory(spec.memory_file, spec.memory_mib)
        return vmm

    async def adopt(self, spec: BootSpec, identity: ProcessIdentity) -> FakeVmm | None:
        held = process.adopt(identity.pid, identity.started_ticks, spec.runtime_dir / "output")
        if held is None:
            return None
        boot_id = Path(f"/proc/{identity.pid}/cmdline").read_bytes().split(b"\0")[-2].decode()
        return FakeVmm(spec, held, boot_id)

    async def _start(self, spec: BootSpec, boot_id: str) -> FakeVmm:
        if not spec.disk.exists() or not spec.kernel.exists():
            raise VmmError("No disk or no kernel", evidence=f"argv: {SCRIPT}")
        control = spec.runtime_dir / "control.sock"
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(control))
            listener.listen(8)
            child = subprocess.Popen(
                [sys.executable, str(SCRIPT), str(listener.fileno()), str(spec.runtime_dir), boot_id],
                pass_fds=(listener.fileno(),),
                start_new_session=True,
                env={"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            )
        ticks = process.started_ticks_of(child.pid)
        held = None if ticks is None else process.adopt(child.pid, ticks, spec.runtime_dir / "output")
        # The pidfd reaps it; `subprocess` must not wait for it too.
        child.returncode = 0
        if held is None:
            raise VmmError("It ended at once")
        vmm = FakeVmm(spec, held, boot_id)
        async with asyncio.timeout(30):
            while not vmm.is_stopped:
                await asyncio.sleep(_POLL_S)
        return vmm


class FakeVmm:
    def __init__(self, spec: BootSpec, held: process.Process, boot_id: str) -> None:
        self._spec = spec
        self._process = held
        self._boot_id = boot_id

    @property
    def identity(self) -> ProcessIdentity:
        return ProcessIdentity(self._process.pid, self._process.started_ticks)

    @property
    def channel(self) -> Channel:
        return Channel("unix", self._spec.runtime_dir / "control.sock")

    @property
    def is_stopped(self) -> bool:
        try:
            stat = Path(f"/proc/{self._process.pid}/stat").read_text()
        except OSError:
            return False
        return stat.rpartition(")")[2].split()[0] == "T"

    async def run(self) -> None:
        await self._turn(signal.SIGCONT, stopped=False)

    async def pause(self) -> None:
        await self._turn(signal.SIGSTOP, stopped=True)

    async def snapshot(self, paths: SnapshotPaths) -> None:
        if not self.is_stopped:
            raise VmmError("Only a paused machine can be saved")
        try:
            with paths.state.open("x") as file:
                file.write(json.dumps({"boot_id": self._boot_id}))
        except OSError as error:
            raise VmmError("The state can't be written") from error
        _write_memory(paths.memory, self._spec.memory_mib)

    async def request_shutdown(self) -> None:
        self._process.signal(signal.SIGTERM)

    async def kill(self) -> None:
        self._process.signal(signal.SIGKILL)
        await self._process.wait()
        self._remove()

    async def wait_exit(self) -> ExitInfo:
        status = await self._process.wait()
        self._remove()
        return ExitInfo(status, "", guest_shutdown=status == 0, guest_panicked=False)

    async def close(self) -> None:
        self._process.close()

    async def _turn(self, number: signal.Signals, *, stopped: bool) -> None:
        self._process.signal(number)
        async with asyncio.timeout(10):
            while self.is_stopped is not stopped:
                if self._process.is_dead:
                    raise VmmError("It is gone")
                await asyncio.sleep(_POLL_S)
        if self._process.is_dead:
            raise VmmError("It is gone")

    def _remove(self) -> None:
        for name in ("control.sock", "output"):
            (self._spec.runtime_dir / name).unlink(missing_ok=True)


def _write_memory(path: Path | None, memory_mib: int) -> None:
    if path is not None:
        path.unlink(missing_ok=True)
        with path.open("wb") as file:
            file.truncate(memory_mib << 20)
