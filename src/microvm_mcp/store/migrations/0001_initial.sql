-- Rows of one service. Times are seconds since the epoch. Migrations are append-only: a change of what is here
-- is a new numbered file.

CREATE TABLE meta (
    key TEXT PRIMARY KEY,
    value TEXT NOT NULL
) STRICT, WITHOUT ROWID;

CREATE TABLE workspaces (
    name TEXT PRIMARY KEY,
    allow_network INTEGER NOT NULL CHECK (allow_network IN (0, 1)),
    max_vms INTEGER CHECK (max_vms >= 0),
    max_memory_mib INTEGER CHECK (max_memory_mib >= 0),
    max_storage_gib INTEGER CHECK (max_storage_gib >= 0),
    created_at REAL NOT NULL,
    revoked_at REAL
) STRICT, WITHOUT ROWID;

-- The token itself is nowhere in here: only its SHA-256.
CREATE TABLE tokens (
    token_id TEXT PRIMARY KEY,
    workspace TEXT NOT NULL REFERENCES workspaces (name),
    digest TEXT NOT NULL UNIQUE CHECK (length(digest) = 64),
    created_at REAL NOT NULL,
    expires_at REAL NOT NULL,
    revoked_at REAL
) STRICT, WITHOUT ROWID;

CREATE INDEX tokens_of_workspace ON tokens (workspace);

CREATE TABLE vms (
    -- Order of creation, never reused; a page of a listing begins behind one.
    seq INTEGER PRIMARY KEY AUTOINCREMENT,
    vm_id TEXT NOT NULL UNIQUE,
    workspace TEXT NOT NULL REFERENCES workspaces (name),
    state TEXT NOT NULL,
    slot INTEGER CHECK (slot >= 0),
    memory_mib INTEGER NOT NULL,
    vcpus INTEGER NOT NULL,
    disk_bytes INTEGER NOT NULL,
    network TEXT NOT NULL,
    idle_seconds INTEGER NOT NULL,
    idle_mode TEXT NOT NULL,
    created_at REAL NOT NULL,
    state_since REAL NOT NULL,
    driver TEXT NOT NULL,
    image_digest TEXT NOT NULL,
    incarnation INTEGER NOT NULL,
    host_boot_id TEXT NOT NULL,
    name TEXT,
    template TEXT,
    -- All four or none.
    failure_at REAL,
    failure_reason TEXT,
    failure_lost TEXT,
    failure_cold_boot_possible INTEGER,
    customised INTEGER NOT NULL CHECK (customised IN (0, 1)),
    vmm_pid INTEGER,
    vmm_started_ticks INTEGER
) STRICT;

CREATE UNIQUE INDEX vms_slot ON vms (slot) WHERE slot IS NOT NULL;
CREATE UNIQUE INDEX vms_name ON vms (workspace, name) WHERE name IS NOT NULL AND state <> 'destroyed';
CREATE INDEX vms_of_workspace ON vms (workspace, seq);
CREATE INDEX vms_destroyed ON vms (workspace, state_since) WHERE state = 'destroyed';

CREATE TABLE jobs (
    seq INTEGER PRIMARY KEY AUTOINCREMENT,
    job_id TEXT NOT NULL UNIQUE,
    vm_id TEXT NOT NULL REFERENCES vms (vm_id) ON DELETE CASCADE,
    workspace TEXT NOT NULL,
    request_id TEXT NOT NULL,
    state TEXT NOT NULL,
    started_at REAL NOT NULL,
    finished_at REAL,
    exit_code INTEGER,
    signal INTEGER,
    truncated INTEGER NOT NULL CHECK (truncated IN (0, 1)),
    detached INTEGER NOT NULL,
    timeout_seconds INTEGER,
    log_path TEXT NOT NULL
) STRICT;

CREATE INDEX jobs_of_vm ON jobs (vm_id, seq);

-- Ids without foreign keys: a receipt outlives what it tells of.
CREATE TABLE receipts (
    workspace TEXT NOT NULL REFERENCES workspaces (name),
    request_id TEXT NOT NULL,
    tool TEXT NOT NULL,
    arguments_digest TEXT NOT NULL,
    phase TEXT NOT NULL CHECK (phase IN ('sent', 'done')),
    created_at REAL NOT NULL,
    finished_at REAL,
    vm_id TEXT,
    job_id TEXT,
    PRIMARY KEY (workspace, request_id)
) STRICT, WITHOUT ROWID;

CREATE INDEX receipts_by_age ON receipts (workspace, created_at);
