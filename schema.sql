-- The whole current schema of a Postrider database; numbered upgrade steps from older ones live in internal/sqlite.
--
-- Times are INTEGER microseconds since 1970, UTC, in columns named *_us; those that something is scheduled by are steady time
-- (meta.steady_us): due_us, wake_us, next_us, hold_us, expires_us. JSON is kept as the bytes that came, in BLOB
-- columns that stand last, so that the small columns of a row are on its first page. AUTOINCREMENT wherever an id must
-- never come back. Big tables are append-only rowid heaps: any index entry per step dirties one leaf page per branch, so
-- (branch, lsn) and (branch, step) are found by a sparse partial index and a walk along prev_id.

-- One row: the identity and life of this database.
CREATE TABLE meta (
  id          INTEGER PRIMARY KEY CHECK (id = 1),
  node        TEXT    NOT NULL,                       -- unique in the fleet, fixed for the life of the file
  epoch       INTEGER NOT NULL CHECK (epoch > 0),     -- a restore starts a higher one
  client_id   TEXT    NOT NULL,                       -- of the publishing relay: the broker cuts an older session
  boot        TEXT    NOT NULL,                       -- machine boot that clock_us and up_us belong to; '': none yet
  clock_us    INTEGER NOT NULL,                       -- last recorded time; within one boot it never goes back
  up_us       INTEGER NOT NULL,                       -- how long that boot had lasted then, time asleep included
  wall_us     INTEGER NOT NULL,                       -- what the wall clock said then: the next boot measures by it how long the machine was off
  steady_us   INTEGER NOT NULL,                       -- time at the machine's pace, whatever is done to the wall clock; began as clock_us
  skip_us     INTEGER NOT NULL DEFAULT 0,             -- steady time that no process saw pass, beyond a day at a time; windows do not count it
  commit_seq  INTEGER NOT NULL,                       -- set by every transaction; tells whether an unknown COMMIT is in
  rewinds     INTEGER NOT NULL DEFAULT 0,             -- moved by every rewind, and when a step in hand loses its input; the relay reads it before each write
  max_record  INTEGER NOT NULL DEFAULT 262144         -- bytes of data that may leave in one record, as the node's last process was told
) STRICT;

-- One row per process that writes: its last transaction. meta.commit_seq alone cannot tell one process's unknown
-- COMMIT from another's that came after it.
CREATE TABLE writer (
  id          TEXT PRIMARY KEY,                       -- random per opened store
  commit_seq  INTEGER NOT NULL,
  at_us       INTEGER NOT NULL
) STRICT, WITHOUT ROWID;

-- Agents that were ever hosted here: send to any other is refused, unless it has a route.
CREATE TABLE agent (
  name        TEXT PRIMARY KEY,
  kind        TEXT    NOT NULL,
  hosted      INTEGER NOT NULL CHECK (hosted IN (0, 1)), -- by the node's last process
  first_us    INTEGER NOT NULL,
  last_us     INTEGER NOT NULL
) STRICT, WITHOUT ROWID;

-- Where inputs for agents that are not hosted here go, as the node's last process was told.
CREATE TABLE route (
  agent       TEXT PRIMARY KEY,
  node        TEXT    NOT NULL,
  best_effort INTEGER NOT NULL CHECK (best_effort IN (0, 1)) -- 1: no outbox behind it: sent, then retired
) STRICT, WITHOUT ROWID;

-- A run and what it does now.
--
--            input due            step committed, more due
--   idle ──────────────▶ ready ──▶ running ◀──┐   idle: nothing due, nothing scheduled
--    ▲  ▲                  ▲          │  └────┘   waiting: until wake_us (a timer, or a pause after an error)
--    │  └── waiting ◀──────┼──────────┤           paused: attempts or continues exhausted; a person decides
--    └─────────────────────┼──────────┘           done, failed: over
--                   paused ┘                      unhosted: its agent is not in this process
CREATE TABLE run (
  id          INTEGER PRIMARY KEY AUTOINCREMENT,
  tenant      TEXT    NOT NULL,
  name        TEXT    NOT NULL,
  agent       TEXT    NOT NULL,
  live        INTEGER NOT NULL,                       -- branch.id; 0 only inside the transaction that makes the run
  gens        INTEGER NOT NULL,                       -- highest branch.gen given out
  status      TEXT    NOT NULL CHECK (status IN ('idle','ready','running','waiting','paused','done','failed','unhosted')),
  wake_us     INTEGER,                                -- not before; NULL: nothing scheduled
  claim       INTEGER NOT NULL DEFAULT 0,             -- fences: a step commits only under the claim it was started with
  claim_step  INTEGER,                                -- step in hand; NULL: none
  claim_input INTEGER,                                -- inbox.id in hand; NULL: none
  claim_alone INTEGER CHECK (claim_alone IN (0, 1)),  -- nothing else was in hand in this process; NULL of a running one: it waits for its turn alone
  claim_boot  TEXT,                                   -- machine boot of the claim
  alone_us    INTEGER,                                -- last turn alone after an unclean end: whose is longest ago comes first
  attempts    INTEGER NOT NULL DEFAULT 0,             -- failed ones of the step in hand
  continues   INTEGER NOT NULL DEFAULT 0,             -- steps without input in a row
  last_error  TEXT,
  created_us  INTEGER NOT NULL,
  updated_us  INTEGER NOT NULL,
  UNIQUE (tenant, name)
) STRICT;
CREATE INDEX run_wake ON run (agent, wake_us, id) WHERE status IN ('ready', 'waiting');
CREATE INDEX run_running ON run (id) WHERE status = 'running';

-- A removed run: a later one of that name goes on counting gen.
CREATE TABLE tombstone (
  tenant      TEXT    NOT NULL,
  name        TEXT    NOT NULL,
  gens        INTEGER NOT NULL,
  removed_us  INTEGER NOT NULL,
  PRIMARY KEY (tenant, name)
) STRICT, WITHOUT ROWID;

-- One line of history of a run, its head, and how far the relay has come with it.
-- fork_lsn ≤ shipped; pending are (shipped, exportable], withheld (max(shipped, exportable), head_lsn].
CREATE TABLE branch (
  id             INTEGER PRIMARY KEY AUTOINCREMENT,
  ulid           TEXT    NOT NULL UNIQUE,
  run            INTEGER NOT NULL REFERENCES run (id),
  tenant         TEXT    NOT NULL,                    -- of the run: the relay takes tenants in turn
  gen            INTEGER NOT NULL,                    -- 1, 2, … per run
  epoch          INTEGER NOT NULL,
  parent         INTEGER REFERENCES branch (id),      -- NULL: root
  fork_step      INTEGER NOT NULL,                    -- 0 on a root
  fork_lsn       INTEGER NOT NULL,                    -- 0 on a root; the first LSN is fork_lsn + 1
  reason         TEXT,                                -- of the rewind that opened it
  opened_us      INTEGER NOT NULL,
  head_step      INTEGER NOT NULL,
  head_lsn       INTEGER NOT NULL,
  event_lsn      INTEGER NOT NULL,                    -- last event of the lineage: the next event's prevlsn
  head_id        INTEGER NOT NULL,                    -- newest checkpoint
  tail_id        INTEGER NOT NULL,                    -- newest record
  head_bytes     INTEGER NOT NULL,                    -- outbox.bytes at head_lsn
  exportable     INTEGER NOT NULL,                    -- last LSN that may be shipped: head_lsn while live, then the fork
  export_bytes   INTEGER NOT NULL,
  shipped        INTEGER NOT NULL,                    -- last LSN with its PUBACK
  shipped_bytes  INTEGER NOT NULL,
  shipped_us     INTEGER NOT NULL,                    -- recorded time of that record: no pending one is older
  backlog_id     INTEGER NOT NULL,                    -- outbox.id that began the present backlog: newest come first
  deliveries     INTEGER NOT NULL DEFAULT 0,          -- of the first unshipped record, all without a PUBACK
  attempts       INTEGER NOT NULL DEFAULT 0,          -- proven strikes against it
  attempt_us     INTEGER,                             -- last delivery
  hold_us        INTEGER,                             -- no delivery before; NULL: now
  last_error     TEXT,
  UNIQUE (run, gen)
) STRICT;
CREATE INDEX branch_backlog ON branch (tenant, backlog_id) WHERE shipped < exportable;
CREATE INDEX branch_withheld ON branch (id) WHERE exportable < head_lsn;
CREATE INDEX branch_parent ON branch (parent) WHERE parent IS NOT NULL;

-- The state after each step. Step 0 is the state before the first.
CREATE TABLE checkpoint (
  id            INTEGER PRIMARY KEY AUTOINCREMENT,
  branch        INTEGER NOT NULL,
  step          INTEGER NOT NULL,
  prev_id       INTEGER,                              -- the branch's checkpoint before; NULL: its first
  next          TEXT    NOT NULL CHECK (next IN ('wait','continue','done','fail')),
  input         INTEGER,                              -- inbox.id that it consumed; NULL: none
  lsn           INTEGER NOT NULL,                     -- LSN head after the step
  event_lsn     INTEGER NOT NULL,                     -- last event of the lineage after the step
  bytes         INTEGER NOT NULL,                     -- outbox.bytes at lsn
  started_us    INTEGER NOT NULL,
  committed_us  INTEGER NOT NULL,
  codec         INTEGER NOT NULL CHECK (codec IN (0, 1, 2, 3)), -- 0 as base_id · 1 whole · 2 splice on base_id · 3 zstd with base_id as dictionary
  base_id       INTEGER CHECK ((base_id IS NULL) = (codec = 1)),
  state         BLOB    CHECK ((state IS NULL) = (codec = 0))
) STRICT;
CREATE UNIQUE INDEX checkpoint_mark ON checkpoint (branch, step) WHERE step % 16 = 0;

-- Records in commit order, which keeps every branch's LSN order.
CREATE TABLE outbox (
  id           INTEGER PRIMARY KEY AUTOINCREMENT,
  prev_id      INTEGER,                               -- the branch's record before; NULL: its first
  branch       INTEGER NOT NULL,
  lsn          INTEGER NOT NULL,
  step         INTEGER NOT NULL,
  kind         INTEGER NOT NULL CHECK (kind IN (1, 2, 3)), -- 1 event · 2 command · 3 message
  prevlsn      INTEGER NOT NULL,
  bytes        INTEGER NOT NULL,                      -- cumulative in the branch: a backlog's size needs no scan
  occurred_us  INTEGER NOT NULL,
  recorded_us  INTEGER NOT NULL,
  type         TEXT    NOT NULL,
  subject      TEXT,
  correlation  TEXT,
  causation    TEXT,
  trace        TEXT,
  topic        TEXT,                                  -- message
  retain       INTEGER CHECK (retain IN (0, 1)),
  to_node      TEXT,                                  -- command
  to_agent     TEXT,
  to_run       TEXT,
  input_id     TEXT,
  hops         INTEGER,
  expires_us   INTEGER,                               -- command, message; NULL: never
  creator_branch INTEGER,                             -- a handed-over input: who created it, so that a rewind of the creator
  creator_step   INTEGER,                             --   can set this record aside
  withheld_us  INTEGER,                               --   in its own row
  data         BLOB    NOT NULL,
  CHECK (kind <> 2 OR (to_node IS NOT NULL AND to_agent IS NOT NULL AND to_run IS NOT NULL AND input_id IS NOT NULL AND hops IS NOT NULL)),
  CHECK (kind <> 3 OR (topic IS NOT NULL AND retain IS NOT NULL))
) STRICT;
-- LSNs are dense, so every 16th finds its neighbours by a walk of at most 15 rows.
CREATE UNIQUE INDEX outbox_mark ON outbox (branch, lsn) WHERE lsn % 16 = 0;
CREATE INDEX outbox_creator ON outbox (creator_branch, creator_step) WHERE creator_branch IS NOT NULL;

-- Records that ended without a PUBACK: dead letters, and those that expired.
CREATE TABLE dead (
  branch       INTEGER NOT NULL,
  lsn          INTEGER NOT NULL,
  reason       TEXT    NOT NULL CHECK (reason IN ('poison', 'expired')),
  attempts     INTEGER NOT NULL,
  first_error  TEXT,
  first_us     INTEGER NOT NULL,
  last_error   TEXT,
  last_us      INTEGER NOT NULL,
  dropped_us   INTEGER,                               -- an operator gave it up
  requeued_us  INTEGER,                               -- an operator has it sent again
  PRIMARY KEY (branch, lsn)
) STRICT, WITHOUT ROWID;

-- Ranges to send again, drained after live records.
CREATE TABLE resend (
  id           INTEGER PRIMARY KEY AUTOINCREMENT,
  branch       INTEGER NOT NULL,
  lo           INTEGER NOT NULL,                      -- next LSN to send
  hi           INTEGER NOT NULL CHECK (lo <= hi),
  consumer     TEXT,                                  -- a fold by name; NULL: everybody
  reason       TEXT    NOT NULL,
  asked_us     INTEGER NOT NULL,
  next_us      INTEGER                                -- not before; NULL: now
) STRICT;
CREATE INDEX resend_branch ON resend (branch, consumer);

-- Records that a consumer asked for and did not get, while later ones of the same answer arrived: after some times it
-- gets a mark instead.
CREATE TABLE resend_vain (
  branch       INTEGER NOT NULL,
  lsn          INTEGER NOT NULL,
  consumer     TEXT    NOT NULL,
  times        INTEGER NOT NULL,
  last_us      INTEGER NOT NULL,
  PRIMARY KEY (branch, lsn, consumer)
) STRICT, WITHOUT ROWID;

-- What was shipped, up to where, when, in sequence: a consumer's cursor is (epoch, seq).
CREATE TABLE ship_log (
  seq         INTEGER PRIMARY KEY AUTOINCREMENT,
  branch      INTEGER NOT NULL,
  upto        INTEGER NOT NULL,                       -- LSN
  at_us       INTEGER NOT NULL
) STRICT;

-- Commands that were shipped and whose receiver has not said what became of them: sent again, with growing pauses.
CREATE TABLE unreceipted (
  branch      INTEGER NOT NULL,
  lsn         INTEGER NOT NULL,
  receiver    TEXT    NOT NULL,                       -- node
  since_us    INTEGER NOT NULL,                       -- first shipped
  sends       INTEGER NOT NULL,
  next_us     INTEGER NOT NULL,
  PRIMARY KEY (branch, lsn)
) STRICT, WITHOUT ROWID;
CREATE INDEX unreceipted_next ON unreceipted (next_us);

-- What receivers said, as ranges per branch.
CREATE TABLE receipt (
  branch      INTEGER NOT NULL,
  lsn         INTEGER NOT NULL,                       -- first of the range
  hi          INTEGER NOT NULL CHECK (lsn <= hi),
  receiver    TEXT    NOT NULL,
  outcome     TEXT    NOT NULL CHECK (outcome IN ('stored','duplicate','conflict','dead')),
  epoch       INTEGER NOT NULL,                       -- of the receiver: a higher birth has it sent again
  at_us       INTEGER NOT NULL,
  PRIMARY KEY (branch, lsn)
) STRICT, WITHOUT ROWID;

-- The relay that may write. fence grows with every session; each write of a relay names the one it was given.
CREATE TABLE relay_lease (
  id          INTEGER PRIMARY KEY CHECK (id = 1),
  fence       INTEGER NOT NULL,
  holder      TEXT    NOT NULL,                       -- pid@host, for people
  since_us    INTEGER NOT NULL,
  last_error  TEXT,                                   -- why the last session ended
  next_us     INTEGER                                 -- when the next is tried
) STRICT;

-- What a broker's kept session of this node's inputs was told to take: a filter that is dropped must be unsubscribed, and
-- one that was granted need not be subscribed again, which would have all retained messages sent again.
CREATE TABLE subscription (
  broker      TEXT    NOT NULL,                       -- host:port
  filter      TEXT    NOT NULL,
  granted     INTEGER NOT NULL DEFAULT 0 CHECK (granted IN (0, 1)),
  PRIMARY KEY (broker, filter)
) STRICT, WITHOUT ROWID;

-- Inputs in order of arrival. A consumed one stays, since a rewind may need it. Pending: not consumed, not cancelled,
-- not withdrawn, not dead, not handed over.
CREATE TABLE inbox (
  id               INTEGER PRIMARY KEY AUTOINCREMENT,
  run              INTEGER,                           -- run.id; NULL: no run here (malformed, or for another node)
  tenant           TEXT    NOT NULL,
  run_name         TEXT    NOT NULL,
  agent            TEXT    NOT NULL,
  node             TEXT,                              -- an explicit @node is kept
  input_id         TEXT    NOT NULL,
  type             TEXT    NOT NULL,
  source           TEXT    NOT NULL,
  hops             INTEGER NOT NULL DEFAULT 0,
  correlation      TEXT,
  causation        TEXT,
  trace            TEXT,
  arrived_us       INTEGER NOT NULL,
  due_us           INTEGER NOT NULL,                  -- max(arrival, due): the order within a run, then id
  at_us            INTEGER,                           -- the wall-clock time that due_us stands for; NULL: none was given
  expires_us       INTEGER,
  attempts         INTEGER NOT NULL DEFAULT 0,
  next_us          INTEGER,
  last_error       TEXT,
  created_branch   INTEGER,                           -- the step that created it; NULL: from outside
  created_step     INTEGER,
  command_id       TEXT,                              -- its creator's own name for it, for cancel
  consumed_branch  INTEGER,
  consumed_step    INTEGER,
  cancelled_branch INTEGER,
  cancelled_step   INTEGER,
  ended_us         INTEGER,                           -- left the inbox otherwise: as outcome says
  outcome          TEXT CHECK (outcome IN ('dead','withdrawn','handed-over','dropped')),
  reason           TEXT,                              -- of the outcome
  data             BLOB    NOT NULL,
  CHECK ((ended_us IS NULL) = (outcome IS NULL))
) STRICT;
CREATE INDEX inbox_pending ON inbox (run, due_us, id) WHERE consumed_branch IS NULL AND cancelled_branch IS NULL AND ended_us IS NULL;
-- What a step created or cancelled: a rewind puts it back.
CREATE INDEX inbox_created ON inbox (created_branch, created_step) WHERE created_branch IS NOT NULL;
CREATE INDEX inbox_cancelled ON inbox (cancelled_branch) WHERE cancelled_branch IS NOT NULL;
-- A run's own commands that it may still cancel.
CREATE INDEX inbox_command ON inbox (command_id, created_branch) WHERE command_id IS NOT NULL AND consumed_branch IS NULL AND cancelled_branch IS NULL AND ended_us IS NULL;
CREATE INDEX inbox_ended ON inbox (run, outcome, id) WHERE outcome IS NOT NULL;
CREATE INDEX inbox_dead ON inbox (tenant, id) WHERE outcome = 'dead';
-- Pending without a run: for other nodes, or not given to a run yet. By run, whose later inputs come behind them.
CREATE INDEX inbox_stray ON inbox (tenant, run_name, due_us, id) WHERE run IS NULL AND consumed_branch IS NULL AND cancelled_branch IS NULL AND ended_us IS NULL;
-- Timers by the wall clock: when that is set, they are due at another steady time.
CREATE INDEX inbox_at ON inbox (id) WHERE at_us IS NOT NULL AND consumed_branch IS NULL AND cancelled_branch IS NULL AND ended_us IS NULL;

-- Input ids that were accepted: explicit and foreign ones. A second arrival is a duplicate when the content agrees,
-- else a conflict.
CREATE TABLE seen (
  tenant      TEXT    NOT NULL,
  run_name    TEXT    NOT NULL,
  input_id    TEXT    NOT NULL,
  hash        BLOB    NOT NULL,                       -- SHA-256 of agent, type and data
  input       INTEGER,                                -- inbox.id that it came with; NULL: from before schema 2
  hops        INTEGER NOT NULL DEFAULT 0,             -- that it came with
  outcome     TEXT    CHECK (outcome IN ('handed-over')), -- accepted again with more hops
  at_us       INTEGER NOT NULL,                       -- steady_us - skip_us: the window begins
  PRIMARY KEY (tenant, run_name, input_id)
) STRICT, WITHOUT ROWID;
CREATE INDEX seen_age ON seen (at_us);

-- The same for Postrider senders: LSNs by the sender's BranchKey, as ranges, without expiry.
CREATE TABLE seen_lsn (
  node        TEXT    NOT NULL,
  tenant      TEXT    NOT NULL,
  run_name    TEXT    NOT NULL,
  branch      TEXT    NOT NULL,
  lo          INTEGER NOT NULL,
  hi          INTEGER NOT NULL CHECK (lo <= hi),
  PRIMARY KEY (node, tenant, run_name, branch, lo)
) STRICT, WITHOUT ROWID;

-- What operators did.
CREATE TABLE audit (
  id          INTEGER PRIMARY KEY AUTOINCREMENT,
  at_us       INTEGER NOT NULL,
  action      TEXT    NOT NULL,
  subject     TEXT    NOT NULL,
  detail      TEXT
) STRICT;

-- Where each record stands; what an operator sees.
CREATE VIEW record_state AS
SELECT o.id, r.tenant, r.name AS run, b.ulid AS branch, b.gen, o.lsn, o.step,
       CASE o.kind WHEN 1 THEN 'event' WHEN 2 THEN 'command' ELSE 'message' END AS kind,
       o.type, COALESCE(o.topic, o.to_agent || '@' || o.to_node, '') AS destination, o.recorded_us,
       CASE WHEN o.withheld_us IS NOT NULL THEN 'withheld'
            WHEN d.reason = 'expired' THEN 'expired'
            WHEN d.reason = 'poison' AND d.requeued_us IS NULL THEN 'dead'
            WHEN o.lsn <= b.shipped THEN 'shipped'
            WHEN o.lsn > b.exportable THEN 'withheld'
            ELSE 'pending' END AS state
FROM outbox o
JOIN branch b ON b.id = o.branch
JOIN run r ON r.id = b.run
LEFT JOIN dead d ON d.branch = o.branch AND d.lsn = o.lsn;
