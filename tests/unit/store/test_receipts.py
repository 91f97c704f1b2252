from __future__ import annotations

import pytest

from microvm_mcp.model import JobId, ReceiptPhase, RequestId, VmId
from microvm_mcp.store import receipts
from microvm_mcp.store.database import Database
from tests.unit.store.rows import DEMO, OTHER, add_receipt, add_workspaces

ACCEPTED, SENT, DONE = ReceiptPhase.ACCEPTED, ReceiptPhase.SENT, ReceiptPhase.DONE
DAY_S = 86_400


@pytest.fixture(autouse=True)
async def _workspaces(db: Database) -> None:
    await db.write(add_workspaces)


async def ids_left(db: Database) -> set[str]:
    return await db.read(
        lambda tx: {row[0] for row in tx.execute("SELECT request_id FROM receipts WHERE workspace = ?", (DEMO,))}
    )


async def test_a_receipt_goes_through_its_phases_and_keeps_its_ids(db: Database) -> None:
    made = await db.write(lambda tx: add_receipt(tx, 1))
    key = made.request_id
    assert await db.read(lambda tx: receipts.get(tx, DEMO, key)) == made
    vm_id, job_id = VmId("vm-1"), JobId("job-1")
    sent = await db.write(
        lambda tx: receipts.set_phase(
            tx, DEMO, key, expect=ACCEPTED, to=SENT, now=2000.0, vm_id=vm_id, job_id=job_id
        )
    )
    assert (sent.phase, sent.finished_at, sent.vm_id, sent.job_id) == (SENT, None, vm_id, job_id)
    done = await db.write(lambda tx: receipts.set_phase(tx, DEMO, key, expect=SENT, to=DONE, now=2001.0))
    assert (done.phase, done.finished_at, done.vm_id, done.job_id) == (DONE, 2001.0, vm_id, job_id)
    assert await db.read(lambda tx: receipts.get(tx, DEMO, key)) == done


async def test_a_receipt_taken_back_to_accepted_forgets_its_ids(db: Database) -> None:
    key = (await db.write(lambda tx: add_receipt(tx, 1))).request_id
    await db.write(
        lambda tx: receipts.set_phase(tx, DEMO, key, expect=ACCEPTED, to=SENT, now=1.0, job_id=JobId("job-1"))
    )
    back = await db.write(lambda tx: receipts.set_phase(tx, DEMO, key, expect=SENT, to=ACCEPTED, now=2.0))
    assert (back.phase, back.job_id) == (ACCEPTED, None)


async def test_a_phase_changes_only_from_the_expected_one(db: Database) -> None:
    key = (await db.write(lambda tx: add_receipt(tx, 1, phase=SENT))).request_id
    with pytest.raises(receipts.StaleReceipt) as caught:
        await db.write(lambda tx: receipts.set_phase(tx, DEMO, key, expect=ACCEPTED, to=DONE, now=1.0))
    assert caught.value.actual is SENT
    unknown = RequestId("unknown")
    with pytest.raises(receipts.StaleReceipt) as caught:
        await db.write(lambda tx: receipts.set_phase(tx, DEMO, unknown, expect=ACCEPTED, to=DONE, now=1.0))
    assert caught.value.actual is None


async def test_request_ids_of_workspaces_do_not_meet(db: Database) -> None:
    await db.write(lambda tx: (add_receipt(tx, 1), add_receipt(tx, 1, workspace=OTHER)))
    await db.write(lambda tx: receipts.delete(tx, OTHER, RequestId("request-1")))
    assert await db.read(lambda tx: receipts.get(tx, DEMO, RequestId("request-1"))) is not None
    assert await db.read(lambda tx: receipts.get(tx, OTHER, RequestId("request-1"))) is None


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
            add_receipt(tx, 3, phase=ACCEPTED, at=now - DAY_S + 1),
        ]
    )
    assert not await db.write(lambda tx: receipts.make_room(tx, DEMO, now=now, max_rows=3))
    assert len(await ids_left(db)) == 3
    assert await db.write(lambda tx: receipts.make_room(tx, DEMO, now=now + 2, max_rows=3))


async def test_refused_calls_do_not_fill_the_table_for_good(db: Database) -> None:
    await db.write(lambda tx: [add_receipt(tx, number, at=float(number)) for number in range(5)])
    assert await db.write(lambda tx: receipts.make_room(tx, DEMO, now=2.0 * DAY_S, max_rows=5))
    assert await ids_left(db) == {f"request-{number}" for number in range(1, 5)}
