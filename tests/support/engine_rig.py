"""A fleet on the fake world with a real store: what the service would do around the engine, in a few lines.

`Rig` is one life of the service. Requests go through receipts the way the service does it: one without runs, a sent
one is resolved, a done one is looked up.
"""

from __future__ import annotations

import sqlite3
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from microvm_mcp.engine.context import EngineSettings
from microvm_mcp.engine.fleet import Fleet
from microvm_mcp.errors import OutcomeUnknown
from microvm_mcp.model import (
    CreateRequest,
    Job,
    JobId,
    JobRequest,
    Limits,
    MachineView,
    OutputPage,
    Receipt,
    ReceiptClaim,
    ReceiptPhase,
    RequestId,
    VmId,
    Workspace,
    WorkspaceName,
)
from microvm_mcp.store import receipts as receipt_rows
from microvm_mcp.store import workspaces as workspace_rows
from microvm_mcp.store.database import Database
from tests.support.world import SETTINGS, Life, World

WORKSPACE = WorkspaceName("w")
OTHER = WorkspaceName("other")
CLAIM = ReceiptClaim("t", "d")


@dataclass
class Rig:
    db: Database
    world: World
    life: Life
    fleet: Fleet
    settings: EngineSettings

    async def receipt(self, request_id: str) -> Receipt | None:
        return await self.db.read(lambda tx: receipt_rows.get(tx, WORKSPACE, RequestId(request_id)))

    async def create(
        self,
        name: str = "1",
        *,
        wait_s: float = 2.0,
        memory_mib: int = 512,
        limits: Limits = Limits(),  # noqa: B008 - frozen
        disk_bytes: int | None = None,
    ) -> MachineView:
        receipt = await self.receipt(f"create-{name}")
        if receipt is not None and receipt.vm_id is not None:
            return await self.fleet.settle(WORKSPACE, receipt.vm_id, wait_s=wait_s)
        request = CreateRequest(
            vm_id=VmId(f"vm-{name}"),
            workspace=WORKSPACE,
            request_id=RequestId(f"create-{name}"),
            limits=limits,
            memory_mib=memory_mib,
            vcpus=1,
            disk_bytes=disk_bytes,
            network="off",
            idle_seconds=300,
            idle_mode="hibernate",
        )
        return await self.fleet.create(request, CLAIM, wait_s=wait_s)

    async def exec(
        self, vm_id: VmId, name: str, command: str = "true", *, wait_s: float = 1.0
    ) -> tuple[Job, OutputPage | None]:
        receipt = await self.receipt(f"exec-{name}")
        if receipt is None:
            # A new attempt has a new id, as in the service.
            request_id = RequestId(f"exec-{name}")
            request = JobRequest(JobId(f"job-{name}-{len(self.life.trace)}"), request_id, command)
            return await self.fleet.start_job(WORKSPACE, vm_id, request, CLAIM, wait_s=wait_s)
        assert receipt.job_id is not None
        job = (
            await self.fleet.job(WORKSPACE, vm_id, receipt.job_id)
            if receipt.phase is ReceiptPhase.DONE
            else await self.fleet.resolve_job(WORKSPACE, vm_id, receipt.job_id)
        )
        if job is None:
            raise OutcomeUnknown("unknown")
        return job, None

    def view(self, name: str = "1") -> MachineView:
        return self.fleet.view(WORKSPACE, VmId(f"vm-{name}"))


@asynccontextmanager
async def rig(
    directory: Path, world: World | None = None, *, life: Life | None = None, settings: EngineSettings = SETTINGS
) -> AsyncIterator[Rig]:
    """One life on the store in `directory`; a second one on the same world and store is a restart."""
    world = world or World()
    life = life or Life(world)
    db = await Database.open(directory / "service.db", readers=1)
    try:
        await db.write(ensure_workspaces)
        fleet = Fleet(life.context(db, settings))
        await fleet.start()
        try:
            yield Rig(db, world, life, fleet, settings)
        finally:
            if not life.dead:
                await fleet.close()
    finally:
        await db.close()


def ensure_workspaces(tx: sqlite3.Connection) -> None:
    for name in (WORKSPACE, OTHER):
        if workspace_rows.get(tx, name) is None:
            workspace_rows.insert(tx, Workspace(name, allow_network=False, limits=Limits(), created_at=1.0))
