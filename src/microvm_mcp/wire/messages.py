"""Messages between host and supervisor. This head is the specification; `frames` has the layout of a frame.

Roles. The host asks, the supervisor answers; it pushes nothing unasked. Long waits are requests with `wait_s`.

Session. The host opens with HELLO: `{"nonce": 32 hex digits, "versions": [1]}`; the first 8 bytes of the nonce are
the session tag of every later frame. WELCOME answers it: `{"nonce", "version", "supervisor", "boot_id",
"active_jobs"}` with the highest version that both speak (each side speaks its present and its previous one), or
ERROR `version`. A new nonce replaces the session: requests that were waiting and answers that were not sent yet
are dropped; jobs are not touched. The same nonce again is answered again and changes nothing. A host whose hello
stays unanswered repeats it behind 64 KiB of padding, which frees a supervisor that waits for the rest of a torn
frame. The layout of frames, HELLO and WELCOME stays the same in all versions.

Message. A REQUEST, REPLY or ERROR frame carries 4 bytes with the length of the message's data (at most 128 KiB),
then a JSON object in UTF-8. The data follow in DATA frames of the same request id, nothing of that direction in
between. Request ids are the host's, rise from 1 and are answered once, in any order. At most 64 requests wait.
Fields are exact: none unknown, none missing, null only where "or null" stands.

| op           | fields                                                             | data           | reply   |
|--------------|--------------------------------------------------------------------|----------------|---------|
| start_job    | job_id request_id cwd shell timeout_s|null max_s wait_s limit      | command NUL K=V| output  |
| job_output   | job_id stdout stderr limit wait_s                                  |                | output  |
| list_jobs    | generation wait_s                                                  |                | jobs    |
| cancel_job   | job_id                                                             |                | job     |
| forget_job   | job_id                                                             |                | done    |
| read_file    | path offset length                                                 |                | file    |
| write_file   | path offset|null mode|null                                         | content        | written |
| set_clock    | now_ns                                                             |                | done    |
| freeze, thaw |                                                                    |                | done    |

| reply   | fields                                                               | data            |
|---------|----------------------------------------------------------------------|-----------------|
| output  | job stdout stderr, each stream: offset length written gap_from gap_bytes | both streams |
| jobs    | generation                                                           | JSON of the jobs |
| job     | job                                                                  |                 |
| file    | offset size mode                                                     | content         |
| written | size mode                                                            |                 |
| done    |                                                                      |                 |

A job is `{job_id, request_id, state, started_at, finished_at|null, exit_code|null, signal|null, truncated,
detached, log_path, service_time_us|null}`; once it is over, exactly one of exit_code and signal is set.

ERROR: `{"code", "message"}`, code one of ErrorCode, message one sentence of at most 512 bytes.

Named tuples instead of dataclasses: the supervisor is started under software emulation too, where importing
`dataclasses` (which drags in `inspect` and `ast`) costs more than all of its own code.
"""

from __future__ import annotations

import re
from enum import Enum
from typing import NamedTuple

WIRE_VERSION = 1
SUPPORTED_VERSIONS: tuple[int, ...] = (1,)
"""The present one and its predecessor, present first."""

NONCE_BYTES = 16
MAX_DATA = 131_072
MAX_WAITING = 64
MAX_COMMAND = 65_536
MAX_ENV_ENTRIES = 64
MAX_ENV_BYTES = 32_768
MAX_PATH = 4_096
MAX_PAGE = 65_536
"""Most bytes of one stream in one output page; two of them fill a message."""
PAGE_BYTES = 16_384
MAX_WAIT_S = 60.0
MAX_SECONDS = 10 * 366 * 86_400
MAX_JOBS = 260
"""Records that a supervisor may hold: 256 finished ones and the active ones."""
MAX_MESSAGE = 512
MAX_LOG_PATH = 256

JOB_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")
REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,64}")
BOOT_ID = re.compile(r"[0-9a-f.-]{1,80}")
SUPERVISOR = re.compile(r"[A-Za-z0-9.+_-]{1,64}")
LOG_PATH = re.compile(r"(/[A-Za-z0-9_-][A-Za-z0-9._-]*)+/output\.log")


class ErrorCode(Enum):
    """Why a supervisor refused. Nothing was changed, except where `failed` says otherwise."""

    INVALID = "invalid"
    NOT_FOUND = "not_found"
    BUSY = "busy"
    CONFLICT = "conflict"
    TOO_LARGE = "too_large"
    NO_SPACE = "no_space"
    """The guest's own disk or quota is full: not the host's."""
    SYMLINK = "symlink"
    NOT_REGULAR = "not_regular"
    DENIED = "denied"
    """The guest's user may not, by the file's permissions."""
    FAILED = "failed"
    VERSION = "version"


class JobState(Enum):
    RUNNING = "running"
    COMPLETED = "completed"
    CANCELLED = "cancelled"
    TIMED_OUT = "timed_out"


class Shell(Enum):
    LOGIN = "login"
    PLAIN = "plain"


class StartJob(NamedTuple):
    """Idempotent by `job_id`. Answers when the job is over, or after `wait_s`, with the output from its start."""

    job_id: str
    request_id: str
    command: str
    cwd: str
    shell: Shell
    env: tuple[tuple[str, str], ...]
    timeout_s: int | None
    max_s: int
    wait_s: float
    limit: int = PAGE_BYTES


class JobOutput(NamedTuple):
    """Answers when there is something behind either offset, the job is over, or after `wait_s`."""

    job_id: str
    stdout: int
    stderr: int
    limit: int
    wait_s: float


class ListJobs(NamedTuple):
    """Answers when `generation` is no longer the present one, or after `wait_s`."""

    generation: int
    wait_s: float


class CancelJob(NamedTuple):
    job_id: str


class ForgetJob(NamedTuple):
    job_id: str


class ReadFile(NamedTuple):
    path: str
    offset: int
    length: int


class WriteFile(NamedTuple):
    path: str
    data: bytes
    offset: int | None
    mode: int | None


class SetClock(NamedTuple):
    now_ns: int


class Freeze(NamedTuple):
    pass


class Thaw(NamedTuple):
    pass


Request = StartJob | JobOutput | ListJobs | CancelJob | ForgetJob | ReadFile | WriteFile | SetClock | Freeze | Thaw


class JobStatus(NamedTuple):
    job_id: str
    request_id: str
    state: JobState
    started_at: float
    finished_at: float | None
    exit_code: int | None
    signal: int | None
    truncated: bool
    detached: int
    log_path: str
    service_time_us: int | None


class Page(NamedTuple):
    offset: int
    data: bytes
    written: int
    gap_from: int
    gap_bytes: int


class Output(NamedTuple):
    job: JobStatus
    stdout: Page
    stderr: Page


class Jobs(NamedTuple):
    generation: int
    jobs: tuple[JobStatus, ...]


class OneJob(NamedTuple):
    job: JobStatus


class FileContent(NamedTuple):
    data: bytes
    offset: int
    size: int
    mode: int


class Written(NamedTuple):
    size: int
    mode: int


class Done(NamedTuple):
    pass


Reply = Output | Jobs | OneJob | FileContent | Written | Done


class Refused(NamedTuple):
    code: ErrorCode
    message: str


class Hello(NamedTuple):
    nonce: bytes
    versions: tuple[int, ...]


class Welcome(NamedTuple):
    nonce: bytes
    version: int
    supervisor: str
    boot_id: str
    """Changes whenever the supervisor starts anew, that is whenever all jobs are lost."""
    active_jobs: int
