-- The whole current schema of a fold's database.
--
-- What arrived is stored under (BranchKey, LSN), and everything else is derived from that by the views at the end, so
-- that the order of arrival cannot matter. The few derived columns (branch.epoch, gen, known, parent; node.epoch) are
-- maxima, minima or facts that only ever become true: they too are the same after any order.
--
-- Times are INTEGER microseconds since 1970, UTC, in columns named *_us. Data is kept as the bytes that came, in a BLOB
-- column that stands last. Records are a rowid heap in order of arrival: a clustered key would dirty a page per branch.

-- One row: the identity of this database.
CREATE TABLE meta (
  id          INTEGER PRIMARY KEY CHECK (id = 1),
  name        TEXT    NOT NULL,                       -- what nodes know this fold by
  client_id   TEXT    NOT NULL,                       -- fixed: the broker's kept session belongs to it
  boot        TEXT    NOT NULL,                       -- machine boot that clock_us belongs to
  clock_us    INTEGER NOT NULL,                       -- last recorded time; within one boot it never goes back
  commit_seq  INTEGER NOT NULL,                       -- set by every transaction; tells whether an unknown COMMIT is in
  duplicates  INTEGER NOT NULL DEFAULT 0              -- redeliveries so far: the only thing here that is not idempotent
) STRICT;

-- One row per process that writes: its last transaction.
CREATE TABLE writer (
  id          TEXT PRIMARY KEY,                       -- random per opened store
  commit_seq  INTEGER NOT NULL,
  at_us       INTEGER NOT NULL
) STRICT, WITHOUT ROWID;

-- A sender, its epoch, and how far its shipments are known.
CREATE TABLE node (
  id           INTEGER PRIMARY KEY AUTOINCREMENT,
  name         TEXT    NOT NULL UNIQUE,
  epoch        INTEGER NOT NULL DEFAULT 0,            -- greatest seen, on a record, in birth or heads
  cursor_epoch INTEGER,                               -- heads were taken in up to (epoch, ship sequence); NULL: none yet
  cursor_seq   INTEGER,
  CHECK ((cursor_epoch IS NULL) = (cursor_seq IS NULL))
) STRICT;

CREATE TABLE run (
  id          INTEGER PRIMARY KEY AUTOINCREMENT,
  tenant      TEXT    NOT NULL,
  name        TEXT    NOT NULL,
  node        INTEGER NOT NULL REFERENCES node (id),
  UNIQUE (tenant, name, node)                         -- by name first: a person often knows no node
) STRICT;

-- A line of history of a run. A row exists as soon as a record or a child speaks of the branch; it counts only once it is
-- known, because before that nobody can say where in the run it belongs.
CREATE TABLE branch (
  id          INTEGER PRIMARY KEY AUTOINCREMENT,
  run         INTEGER NOT NULL REFERENCES run (id),
  ulid        TEXT    NOT NULL,
  epoch       INTEGER NOT NULL DEFAULT 0,             -- 0 with gen 0: only a child has spoken of it
  gen         INTEGER NOT NULL DEFAULT 0,
  known       INTEGER NOT NULL DEFAULT 0 CHECK (known IN (0, 1)), -- by its root record, branch.opened, heads or a hole
  parent      INTEGER REFERENCES branch (id),         -- NULL: root, or not known
  fork_step   INTEGER,                                -- NULL: root, or not known; heads and holes do not say it
  fork_lsn    INTEGER NOT NULL DEFAULT 0,             -- 0: root, or not known
  opened_lsn  INTEGER,                                -- the branch.opened that parent and fork are from: of several the
  opened_hash BLOB,                                   --   smallest (LSN, content hash); NULL: none came
  kept_epoch  INTEGER,                                -- greatest epoch whose heads list it: a restore did not abandon it
  heads_seq   INTEGER,                                -- ship sequence of those heads
  heads_live  INTEGER CHECK (heads_live IN (0, 1)),
  heads_lsn   INTEGER,                                -- the last event that was shipped, as those heads say
  UNIQUE (run, ulid),
  CHECK ((opened_lsn IS NULL) = (opened_hash IS NULL))
) STRICT;
CREATE INDEX branch_rank ON branch (run, epoch, gen, ulid) WHERE known = 1;
CREATE INDEX branch_unknown ON branch (run) WHERE known = 0;

-- Every event that came. Of several under one (branch, LSN) exactly one is shown: a record before a mark, then the
-- smallest (content hash, prevlsn). The others stay beside it; a record beside a record is a conflict.
CREATE TABLE record (
  id          INTEGER PRIMARY KEY,
  branch      INTEGER NOT NULL REFERENCES branch (id),
  lsn         INTEGER NOT NULL CHECK (lsn > 0),
  prevlsn     INTEGER NOT NULL CHECK (prevlsn >= 0 AND prevlsn < lsn),
  shown       INTEGER NOT NULL CHECK (shown IN (0, 1)),
  mark        INTEGER NOT NULL CHECK (mark IN (0, 1)),
  step        INTEGER NOT NULL,
  occurred_us INTEGER NOT NULL,
  recorded_us INTEGER NOT NULL,                       -- by the node
  arrived_us  INTEGER NOT NULL,                       -- here
  type        TEXT    NOT NULL,
  subject     TEXT    NOT NULL,                       -- these four: '' is absent
  correlation TEXT    NOT NULL,
  causation   TEXT    NOT NULL,
  trace       TEXT    NOT NULL,
  data        BLOB    NOT NULL
) STRICT;
CREATE UNIQUE INDEX record_key ON record (branch, lsn) WHERE shown = 1;
CREATE INDEX record_beside ON record (branch, lsn) WHERE shown = 0;

-- LSNs that will never come: retention removed them at the node.
CREATE TABLE hole (
  branch      INTEGER NOT NULL REFERENCES branch (id),
  lo          INTEGER NOT NULL CHECK (lo > 0),
  hi          INTEGER NOT NULL CHECK (hi >= lo),
  at_us       INTEGER NOT NULL,
  PRIMARY KEY (branch, lo, hi)
) STRICT, WITHOUT ROWID;

-- What came on an events topic and is no event of it. The newest are kept, the payload's beginning only; id counts all.
CREATE TABLE malformed (
  id          INTEGER PRIMARY KEY AUTOINCREMENT,
  topic       TEXT    NOT NULL,
  reason      TEXT    NOT NULL,
  at_us       INTEGER NOT NULL,
  size        INTEGER NOT NULL,                       -- of the whole payload, in bytes
  payload     BLOB    NOT NULL
) STRICT;

-- The live branch of each run; NULL: none. A lower epoch than the greatest seen of the node counts only if heads of that
-- epoch kept the branch: what a restore lost has not happened.
CREATE VIEW live AS
SELECT r.id AS run,
       (SELECT b.id FROM branch b
        WHERE b.run = r.id AND b.known = 1 AND (b.epoch = n.epoch OR b.kept_epoch = n.epoch)
        ORDER BY b.epoch DESC, b.gen DESC, b.ulid DESC LIMIT 1) AS branch
FROM run r JOIN node n ON n.id = r.node;

-- Branches that would be live if only they were known: their branch.opened (or root) is missing. That is a loss like any
-- other, so their first record stands after a gap and all of them are parked.
CREATE VIEW unplaced AS
SELECT b.run, b.id AS branch
FROM branch b JOIN run r ON r.id = b.run JOIN node n ON n.id = r.node JOIN live v ON v.run = b.run
LEFT JOIN branch l ON l.id = v.branch
WHERE b.known = 0 AND b.epoch = n.epoch AND (l.id IS NULL OR (b.epoch, b.gen, b.ulid) > (l.epoch, l.gen, l.ulid));

-- The pieces (lo, hi] of the branches that make up a head's history: itself, then its parents, cut at the forks. Heads
-- are the live branches and the unplaced ones. A parent that is not of an earlier generation ends the chain: no cycles.
CREATE VIEW lineage AS
WITH RECURSIVE chain (run, head, branch, lo, hi) AS (
  SELECT h.run, b.id, b.id, b.fork_lsn, 9223372036854775807
  FROM (SELECT run, branch FROM live UNION ALL SELECT run, branch FROM unplaced) h JOIN branch b ON b.id = h.branch
  UNION ALL
  SELECT c.run, c.head, p.id, p.fork_lsn, min(c.lo, c.hi)
  FROM chain c JOIN branch b ON b.id = c.branch JOIN branch p ON p.id = b.parent AND p.gen < b.gen
)
SELECT run, head, branch, lo, hi FROM chain;

-- The events of each head's history, each with the LSN of the one before it (0: none, -1: nobody can know).
CREATE VIEW line AS
SELECT c.run, c.head, r.branch, r.lsn, r.prevlsn,
       lag(r.lsn, 1, h.known - 1) OVER (PARTITION BY c.head ORDER BY r.lsn) AS before
FROM lineage c
JOIN branch h ON h.id = c.head
JOIN record r ON r.branch = c.branch AND r.shown = 1 AND r.lsn > c.lo AND r.lsn <= c.hi;

-- Where history is missing: after is the last event before the gap (0: none), missing an event that must have been, next
-- the first one after it (NULL: the node has shipped it, and nothing later has come either).
CREATE VIEW gap AS
SELECT l.run, l.head, l.branch, max(l.before, 0) AS after, l.prevlsn AS missing, l.lsn AS next
FROM line l
WHERE l.prevlsn <> l.before
  AND NOT EXISTS (SELECT 1 FROM hole o JOIN lineage c ON c.branch = o.branch AND c.head = l.head
                  WHERE l.prevlsn BETWEEN o.lo AND o.hi AND l.prevlsn > c.lo AND l.prevlsn <= c.hi)
UNION ALL
SELECT b.run, b.id, b.id, coalesce((SELECT max(r.lsn) FROM record r WHERE r.branch = b.id AND r.shown = 1), 0) AS last, b.heads_lsn, NULL
FROM live v JOIN branch b ON b.id = v.branch
WHERE b.heads_lsn > last AND b.heads_lsn > b.fork_lsn
  AND NOT EXISTS (SELECT 1 FROM hole o WHERE o.branch = b.id AND b.heads_lsn BETWEEN o.lo AND o.hi);

-- Events of a head's history after its first gap: stored, not shown.
CREATE VIEW parked AS
SELECT c.run, c.head, r.branch, r.lsn
FROM (SELECT head, min(next) AS next FROM gap GROUP BY head) g
JOIN lineage c ON c.head = g.head
JOIN record r ON r.branch = c.branch AND r.shown = 1 AND r.lsn > c.lo AND r.lsn <= c.hi AND r.lsn >= g.next;

-- Events off the live lineage: a rewind or a restore has undone them.
CREATE VIEW abandoned AS
SELECT b.run, r.branch, r.lsn
FROM record r JOIN branch b ON b.id = r.branch
WHERE r.shown = 1
  AND NOT EXISTS (SELECT 1 FROM lineage c WHERE c.branch = r.branch AND r.lsn > c.lo AND r.lsn <= c.hi);

-- Keys under which records of different content came.
CREATE VIEW conflict AS
SELECT b.run, r.branch, r.lsn, count(*) + 1 AS contents
FROM record r JOIN branch b ON b.id = r.branch
WHERE r.shown = 0 AND r.mark = 0
GROUP BY r.branch, r.lsn;
