"""Rows with everything set that a test does not care about."""

from __future__ import annotations

import sqlite3
from dataclasses import replace
from pathlib import Path

from microvm_mcp.model import (
    Job,
    JobId,
    JobState,
    Limits,
    Receipt,
    ReceiptPhase,
    RequestId,
    Slot,
    Vm,
    VmId,
    VmState,
    Workspace,
    WorkspaceName,
)
from microvm_mcp.store import jobs, receipts, vms, workspaces

DEMO = WorkspaceName("demo")
OTHER = WorkspaceName("other")


def add_workspaces(tx: sqlite3.Connection) -> None:
    for name in (DEMO, OTHER):
        workspaces.insert(tx, Workspace(name, allow_network=False, limits=Limits(), created_at=1.0))


def a_vm(number: int, *, workspace: WorkspaceName = DEMO, slot: int | None = None, name: str | None = None) -> Vm:
    return Vm(
        vm_id=VmId(f"vm-{number:024x}"),
        workspace=workspace,
        state=VmState.CREATING,
        slot=None if slot is None else Slot(slot),
        memory_mib=1024,
        vcpus=2,
        disk_bytes=3 << 30,
        network="off",
        idle_seconds=300,
        idle_mode="hibernate",
        created_at=100.0 + number,
        state_since=100.0 + number,
        driver="qemu",
        image_digest="ab" * 32,
        host_boot_id="boot-1",
        name=name,
    )


def add_vm(
    tx: sqlite3.Connection,
    number: int,
    *,
    workspace: WorkspaceName = DEMO,
    state: VmState = VmState.RUNNING,
    slot: int | None = None,
    name: str | None = None,
    since: float | None = None,
) -> Vm:
    vm = replace(a_vm(number, workspace=workspace, slot=slot, name=name), state=state)
    if since is not None:
        vm = replace(vm, state_since=since)
    vms.insert(tx, vm)
    return vm


def a_job(number: int, vm: Vm, *, state: JobState = JobState.RUNNING) -> Job:
    return Job(
        job_id=JobId(f"job-{number:024x}"),
        vm_id=vm.vm_id,
        workspace=vm.workspace,
        request_id=RequestId(f"run-{number}"),
        state=state,
        started_at=200.0 + number,
    )


def add_job(tx: sqlite3.Connection, number: int, vm: Vm, *, state: JobState = JobState.RUNNING) -> Job:
    job = a_job(number, vm, state=state)
    jobs.insert(tx, job)
    return job


def add_receipt(
    tx: sqlite3.Connection,
    number: int,
    *,
    workspace: WorkspaceName = DEMO,
    phase: ReceiptPhase = ReceiptPhase.SENT,
    at: float = 1000.0,
) -> Receipt:
    receipt = Receipt(
        workspace=workspace,
        request_id=RequestId(f"request-{number}"),
        tool="vm_exec",
        arguments_digest="cd" * 32,
        phase=phase,
        created_at=at,
        finished_at=at if phase is ReceiptPhase.DONE else None,
    )
    receipts.insert(tx, receipt)
    return receipt


def names_in(directory: Path) -> list[str]:
    return sorted(file.name for file in directory.iterdir())
