"""Rows of machines. It compares and sets, it does not judge: which move is legal is the lifecycle's business.

The owner is part of the key of every query that serves a caller. `move` is the only way to another state. A slot
is taken as long as a row names it; a name is taken as long as its machine is not destroyed.
"""

# ruff: noqa: S608 - only constants of the store are put into SQL text; values are always bound

from __future__ import annotations

import sqlite3
from collections.abc import Mapping
from typing import TypedDict, Unpack

from microvm_mcp.errors import Conflict, NotFound, PermissionDenied
from microvm_mcp.model import Failure, IdleMode, Network, Slot, Vm, VmId, VmState, WorkspaceName

_PLAIN_COLUMNS = (
    "slot",
    "memory_mib",
    "vcpus",
    "disk_bytes",
    "network",
    "idle_seconds",
    "idle_mode",
    "driver",
    "image_digest",
    "incarnation",
    "host_boot_id",
    "name",
    "template",
    "customised",
    "vmm_pid",
    "vmm_started_ticks",
)
_FAILURE_COLUMNS = ("failure_at", "failure_reason", "failure_lost", "failure_cold_boot_possible")
_ALL_COLUMNS = ("vm_id", "workspace", "state", "created_at", "state_since", *_PLAIN_COLUMNS, *_FAILURE_COLUMNS)
_SELECT = f"SELECT {', '.join(_ALL_COLUMNS)} FROM vms"
_RETURNING = f"RETURNING {', '.join(_ALL_COLUMNS)}"

Value = str | int | float | None


class VmChanges(TypedDict, total=False):
    """What may change besides the state."""

    slot: Slot | None
    memory_mib: int
    vcpus: int
    disk_bytes: int
    network: Network
    idle_seconds: int
    idle_mode: IdleMode
    driver: str
    image_digest: str
    incarnation: int
    host_boot_id: str
    name: str | None
    template: str | None
    customised: bool
    vmm_pid: int | None
    vmm_started_ticks: int | None
    failure: Failure | None


class StaleState(Exception):
    """The row is not in a state that the mover expected; `actual` is None if there is no row."""

    def __init__(self, vm_id: VmId, expected: frozenset[VmState], actual: VmState | None) -> None:
        super().__init__(f"{vm_id} is {actual or 'unknown'}, expected {' or '.join(sorted(expected))}")
        self.vm_id = vm_id
        self.expected = expected
        self.actual = actual


def insert(tx: sqlite3.Connection, vm: Vm) -> None:
    """Conflict if a machine of that workspace which is not destroyed has the name.

    PermissionDenied if the workspace is revoked: a call that was let in just before must not add a machine behind
    the back of whoever ends them all.
    """
    revoked = tx.execute(
        "SELECT 1 FROM workspaces WHERE name = ? AND revoked_at IS NOT NULL", (vm.workspace,)
    ).fetchone()
    if revoked is not None:
        raise PermissionDenied("This workspace is revoked; the operator issues tokens for another one.")
    if vm.name is not None:
        _refuse_taken_name(tx, vm.workspace, vm.name, but=vm.vm_id)
    values = {
        "vm_id": vm.vm_id,
        "workspace": vm.workspace,
        "state": vm.state,
        "created_at": vm.created_at,
        "state_since": vm.state_since,
        **{column: getattr(vm, column) for column in _PLAIN_COLUMNS},
        **_failure_values(vm.failure),
    }
    marks = ", ".join(f":{column}" for column in _ALL_COLUMNS)
    tx.execute(f"INSERT INTO vms ({', '.join(_ALL_COLUMNS)}) VALUES ({marks})", values)


def get(tx: sqlite3.Connection, vm_id: VmId) -> Vm | None:
    row = tx.execute(f"{_SELECT} WHERE vm_id = ?", (vm_id,)).fetchone()
    return None if row is None else _from_row(row)


def get_owned(tx: sqlite3.Connection, workspace: WorkspaceName, vm_id: VmId) -> Vm | None:
    row = tx.execute(f"{_SELECT} WHERE workspace = ? AND vm_id = ?", (workspace, vm_id)).fetchone()
    return None if row is None else _from_row(row)


def list_owned(
    tx: sqlite3.Connection, workspace: WorkspaceName, *, limit: int, after_vm_id: VmId | None = None
) -> list[Vm]:
    """Machines that are not destroyed, in order of creation, behind `after_vm_id` (destroyed or not)."""
    behind = 0
    if after_vm_id is not None:
        found = tx.execute(
            "SELECT seq FROM vms WHERE workspace = ? AND vm_id = ?", (workspace, after_vm_id)
        ).fetchone()
        if found is None:
            raise NotFound("The cursor names no machine of this workspace; list again without a cursor.")
        behind = int(found["seq"])
    rows = tx.execute(
        f"{_SELECT} WHERE workspace = ? AND seq > ? AND state <> 'destroyed' ORDER BY seq LIMIT ?",
        (workspace, behind, limit),
    )
    return [_from_row(row) for row in rows]


def destroyed_owned(tx: sqlite3.Connection, workspace: WorkspaceName) -> list[Vm]:
    rows = tx.execute(f"{_SELECT} WHERE workspace = ? AND state = 'destroyed' ORDER BY seq", (workspace,))
    return [_from_row(row) for row in rows]


def retained(tx: sqlite3.Connection) -> list[Vm]:
    """All that are not destroyed, of all workspaces, in order of creation."""
    return [_from_row(row) for row in tx.execute(f"{_SELECT} WHERE state <> 'destroyed' ORDER BY seq")]


def move(
    tx: sqlite3.Connection,
    vm_id: VmId,
    *,
    expect: frozenset[VmState] | VmState,
    to: VmState,
    now: float,
    **changes: Unpack[VmChanges],
) -> Vm:
    """Compare and set: from one of `expect` to `to`, together with `changes`. Raises StaleState."""
    expected = frozenset({expect}) if isinstance(expect, VmState) else expect
    present = get(tx, vm_id)
    if present is None or present.state not in expected:
        raise StaleState(vm_id, expected, None if present is None else present.state)
    return _update(tx, present, {"state": to, "state_since": now, **_values(changes)})


def change(tx: sqlite3.Connection, vm_id: VmId, **changes: Unpack[VmChanges]) -> Vm:
    """Change what is no state. Raises StaleState if there is no row."""
    present = get(tx, vm_id)
    if present is None:
        raise StaleState(vm_id, frozenset(VmState), None)
    return _update(tx, present, _values(changes))


def take_slot(tx: sqlite3.Connection, slots: int) -> Slot | None:
    """The smallest free one of `slots`, None if all are taken. It is taken by the row that names it."""
    free = 0
    for row in tx.execute("SELECT slot FROM vms WHERE slot IS NOT NULL ORDER BY slot"):
        if row["slot"] != free:
            break
        free += 1
    return Slot(free) if free < slots else None


def prune_destroyed(tx: sqlite3.Connection, *, older_than: float, keep: int) -> int:
    """Forget machines destroyed before `older_than`, with their jobs, except the last `keep` of each workspace."""
    done = tx.execute(
        "DELETE FROM vms WHERE vm_id IN (SELECT vm_id FROM (SELECT vm_id, state_since, row_number() OVER "
        "(PARTITION BY workspace ORDER BY state_since DESC, seq DESC) AS age FROM vms WHERE state = 'destroyed') "
        "WHERE age > ? AND state_since < ?)",
        (keep, older_than),
    )
    return done.rowcount


def _update(tx: sqlite3.Connection, present: Vm, values: Mapping[str, Value]) -> Vm:
    if not values:
        return present
    name = values.get("name")
    if isinstance(name, str) and name != present.name:
        _refuse_taken_name(tx, present.workspace, name, but=present.vm_id)
    sets = ", ".join(f"{column} = :{column}" for column in values)
    row = tx.execute(
        f"UPDATE vms SET {sets} WHERE vm_id = :vm_id {_RETURNING}", {**values, "vm_id": present.vm_id}
    ).fetchone()
    return _from_row(row)


def _values(changes: VmChanges) -> dict[str, Value]:
    """Columns come from the fixed list above, never from a caller's words."""
    given: dict[str, object] = dict(changes)
    values: dict[str, Value] = {}
    if "failure" in changes:
        values |= _failure_values(changes["failure"])
        del given["failure"]
    for column, value in given.items():
        if column not in _PLAIN_COLUMNS:
            raise TypeError(f"{column} is no column that may change")
        assert value is None or isinstance(value, str | int | float)
        values[column] = value
    return values


def _failure_values(failure: Failure | None) -> dict[str, Value]:
    if failure is None:
        return dict.fromkeys(_FAILURE_COLUMNS)
    return dict(
        zip(_FAILURE_COLUMNS, (failure.at, failure.reason, failure.lost, failure.cold_boot_possible), strict=True)
    )


def _refuse_taken_name(tx: sqlite3.Connection, workspace: WorkspaceName, name: str, *, but: VmId) -> None:
    taken = tx.execute(
        "SELECT 1 FROM vms WHERE workspace = ? AND name = ? AND state <> 'destroyed' AND vm_id <> ?",
        (workspace, name, but),
    ).fetchone()
    if taken is not None:
        raise Conflict(
            "Another machine of this workspace has this name; choose another name or destroy that machine."
        )


def _from_row(row: sqlite3.Row) -> Vm:
    failure = None
    if row["failure_at"] is not None:
        failure = Failure(
            at=row["failure_at"],
            reason=row["failure_reason"],
            lost=row["failure_lost"],
            cold_boot_possible=bool(row["failure_cold_boot_possible"]),
        )
    return Vm(
        vm_id=VmId(row["vm_id"]),
        workspace=WorkspaceName(row["workspace"]),
        state=VmState(row["state"]),
        slot=row["slot"],
        memory_mib=row["memory_mib"],
        vcpus=row["vcpus"],
        disk_bytes=row["disk_bytes"],
        network=row["network"],
        idle_seconds=row["idle_seconds"],
        idle_mode=row["idle_mode"],
        created_at=row["created_at"],
        state_since=row["state_since"],
        driver=row["driver"],
        image_digest=row["image_digest"],
        incarnation=row["incarnation"],
        host_boot_id=row["host_boot_id"],
        name=row["name"],
        template=row["template"],
        failure=failure,
        customised=bool(row["customised"]),
        vmm_pid=row["vmm_pid"],
        vmm_started_ticks=row["vmm_started_ticks"],
    )
