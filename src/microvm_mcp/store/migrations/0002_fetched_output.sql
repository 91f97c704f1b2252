-- What was fetched of the output of jobs: readable when the guest that held it is gone. Goes with the job's row.

CREATE TABLE fetched (
    -- Order of the first fetch: the oldest go first.
    seq INTEGER PRIMARY KEY AUTOINCREMENT,
    job_id TEXT NOT NULL UNIQUE REFERENCES jobs (job_id) ON DELETE CASCADE,
    workspace TEXT NOT NULL,
    -- Bytes that the guest said were written, when it was last asked.
    stdout_written INTEGER NOT NULL,
    stderr_written INTEGER NOT NULL,
    -- Nothing was written after that.
    complete INTEGER NOT NULL CHECK (complete IN (0, 1)),
    bytes INTEGER NOT NULL
) STRICT;

CREATE INDEX fetched_of_workspace ON fetched (workspace, seq, bytes);

-- Pieces of one stream never overlap.
CREATE TABLE fetched_pieces (
    job_id TEXT NOT NULL REFERENCES fetched (job_id) ON DELETE CASCADE,
    stream TEXT NOT NULL CHECK (stream IN ('stdout', 'stderr')),
    start INTEGER NOT NULL,
    data BLOB NOT NULL,
    PRIMARY KEY (job_id, stream, start)
) STRICT;
