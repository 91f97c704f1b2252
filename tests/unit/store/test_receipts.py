from __future__ import annotations

import sqlite3
from dataclasses import replace

import pytest

from microvm_mcp.errors import ResourceExhausted
from microvm_mcp.model import JobId, Receipt, ReceiptClaim, ReceiptPhase, RequestId, VmId
from microvm_mcp.store import receipts
from microvm_mcp.store.database import Database
from tests.unit.store.rows import DEMO, OTHER, add_receipt, add_workspaces

SENT, DONE = ReceiptPhase.SENT, ReceiptPhase.DONE
DAY_S = 86_400
KEY, VM_ID, JOB_ID = RequestId("r"), VmId("vm-1"), JobId("job-1")
CLAIM = ReceiptClaim("vm_exec", "d")


def claim(tx: sqlite3.Connection, phase: ReceiptPhase, *, now: float) -> Receipt:
    return receipts.claim(tx, DEMO, KEY, CLAIM, phase, now=now, vm_id=VM_ID, job_id=JOB_ID)


@pytest.fixture(autouse=True)
async def _workspaces(db: Database) -> None:
    await db.write(add_workspaces)


async def ids_left(db: Database) -> set[str]:
    return await db.read(
        lambda tx: {row[0] for row in tx.execute("SELECT request_id FROM receipts WHERE workspace = ?", (DEMO,))}
    )


async def test_a_receipt_is_claimed_with_its_ids_and_finished_for_its_job(db: Database) -> None:
    sent = await db.write(lambda tx: claim(tx, SENT, now=2000.0))
    assert (sent.phase, sent.tool, sent.arguments_digest) == (SENT, "vm_exec", "d")
    assert (sent.created_at, sent.finished_at, sent.vm_id, sent.job_id) == (2000.0, None, VM_ID, JOB_ID)
    assert await db.read(lambda tx: receipts.get(tx, DEMO, KEY)) == sent
    other = await db.write(lambda tx: receipts.finish(tx, DEMO, KEY, JobId("job-2"), now=2001.0))
    assert other == sent
    done = await db.write(lambda tx: receipts.finish(tx, DEMO, KEY, JOB_ID, now=2002.0))
    assert done == replace(sent, phase=DONE, finished_at=2002.0)
    assert await db.write(lambda tx: receipts.finish(tx, DEMO, KEY, JOB_ID, now=2003.0)) == done
    assert await db.write(lambda tx: receipts.finish(tx, DEMO, RequestId("none"), JOB_ID, now=1.0)) is None


async def test_a_request_that_is_over_at_once_is_done_from_the_start(db: Database) -> None:
    done = await db.write(lambda tx: claim(tx, DONE, now=5.0))
    assert (done.phase, done.finished_at) == (DONE, 5.0)


@pytest.mark.parametrize("phase", [SENT, DONE])
async def test_a_receipt_is_never_claimed_twice(db: Database, phase: ReceiptPhase) -> None:
    first = await db.write(lambda tx: claim(tx, phase, now=1.0))
    with pytest.raises(receipts.ReceiptTaken):
        await db.write(lambda tx: claim(tx, SENT, now=2.0))
    assert await db.read(lambda tx: receipts.get(tx, DEMO, KEY)) == first


async def test_a_claim_that_finds_no_room_says_the_numbers_and_leaves_nothing(db: Database) -> None:
    await db.write(lambda tx: add_receipt(tx, 1, phase=DONE, at=100.0))
    asked = ReceiptClaim("vm_exec", "d", keep_s=3600, max_rows=1)
    with pytest.raises(ResourceExhausted, match="1 request ids that must be kept for 1 hours") as refused:
        await db.write(lambda tx: receipts.claim(tx, DEMO, KEY, asked, SENT, now=3700.0, vm_id=VM_ID))
    assert refused.value.details == {"limit": "request_ids", "allowed": 1, "kept_hours": 1}
    assert await ids_left(db) == {"request-1"}
    await db.write(lambda tx: receipts.claim(tx, DEMO, KEY, asked, SENT, now=3701.0, vm_id=VM_ID))
    assert await ids_left(db) == {KEY}


async def test_only_a_sent_receipt_of_that_job_is_taken_back(db: Database) -> None:
    await db.write(lambda tx: claim(tx, SENT, now=1.0))
    await db.write(lambda tx: receipts.take_back(tx, DEMO, KEY, JobId("job-2")))
    assert await ids_left(db) == {KEY}
    await db.write(lambda tx: receipts.take_back(tx, DEMO, KEY, JOB_ID))
    assert await ids_left(db) == set()
    await db.write(lambda tx: (claim(tx, SENT, now=1.0), receipts.finish(tx, DEMO, KEY, JOB_ID, now=2.0)))
    await db.write(lambda tx: receipts.take_back(tx, DEMO, KEY, JOB_ID))
    assert await ids_left(db) == {KEY}


async def test_request_ids_of_workspaces_do_not_meet(db: Database) -> None:
    await db.write(lambda tx: (add_receipt(tx, 1), add_receipt(tx, 1, workspace=OTHER)))
    await db.write(lambda tx: receipts.claim(tx, DEMO, KEY, CLAIM, SENT, now=1.0, vm_id=VM_ID, job_id=JOB_ID))
    await db.write(lambda tx: receipts.take_back(tx, OTHER, KEY, JOB_ID))
    assert await db.read(lambda tx: receipts.get(tx, DEMO, KEY)) is not None
    assert await db.read(lambda tx: receipts.get(tx, OTHER, KEY)) is None


async def test_the_same_request_id_is_never_recorded_twice(db: Database) -> None:
    await db.write(lambda tx: add_receipt(tx, 1))
    with pytest.raises(Exception, match="UNIQUE"):
        await db.write(lambda tx: add_receipt(tx, 1))


async def test_below_the_limit_nothing_goes_however_old(db: Database) -> None:
    await db.write(lambda tx: [add_receipt(tx, number, phase=DONE, at=0.0) for number in range(3)])
    assert await db.write(lambda tx: receipts.make_room(tx, DEMO, now=10.0 * DAY_S, max_rows=4))
    assert len(await ids_left(db)) == 3


async def test_at_the_limit_the_oldest_finished_past_its_time_makes_room(db: Database) -> None:
    now = 10.0 * DAY_S
    await db.write(
        lambda tx: [
            add_receipt(tx, 1, phase=SENT, at=0.0),
            add_receipt(tx, 2, phase=DONE, at=2.0),
            add_receipt(tx, 3, phase=DONE, at=1.0),
            add_receipt(tx, 4, phase=DONE, at=now - 5),
            add_receipt(tx, 5, workspace=OTHER, phase=DONE, at=0.0),
        ]
    )
    assert await db.write(lambda tx: receipts.make_room(tx, DEMO, now=now, max_rows=4))
    assert await ids_left(db) == {"request-1", "request-2", "request-4"}
    assert await db.read(lambda tx: receipts.get(tx, OTHER, RequestId("request-5"))) is not None


async def test_no_room_when_all_are_young_or_of_unknown_outcome(db: Database) -> None:
    now = 10.0 * DAY_S
    await db.write(
        lambda tx: [
            add_receipt(tx, 1, phase=SENT, at=0.0),
            add_receipt(tx, 2, phase=DONE, at=now - DAY_S + 1),
            add_receipt(tx, 3, phase=DONE, at=now - DAY_S + 1),
        ]
    )
    assert not await db.write(lambda tx: receipts.make_room(tx, DEMO, now=now, max_rows=3))
    assert len(await ids_left(db)) == 3
    assert await db.write(lambda tx: receipts.make_room(tx, DEMO, now=now + 2, max_rows=3))
