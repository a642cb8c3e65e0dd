package fold

import (
	"context"
	"crypto/rand"
	"database/sql"
	_ "embed"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"strings"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"postrider/internal/record"
	"postrider/internal/sqlite"
)

//go:embed schema.sql
var schemaText string

const (
	// maxMalformed is how many malformed messages are kept; the counter goes on.
	maxMalformed = 1000
	// maxMalformedPayload is how much of each payload is kept, in bytes.
	maxMalformedPayload = 1024
	// maxCached bounds the memory for branch rows, about 400 bytes each.
	maxCached = 50_000
	// maxConflictLines bounds the Error lines of one batch; the last one says how many there were.
	maxConflictLines = 10
)

// Options of Open; the zero value opens an existing database for reading and writing.
type Options struct {
	// Name is what nodes know this fold by. "": the one in the database; in a new one the host's name and a random suffix.
	// It is fixed for the life of the database: the broker's kept session belongs to it.
	Name    string
	Store   sqlite.Options
	Logger  *slog.Logger          // nil: Store.Logger, else none
	Metrics prometheus.Registerer // for the fold's own metrics; nil: none
}

// Fold is one open fold database. Its methods are safe for concurrent use.
type Fold struct {
	store    *sqlite.Store
	name     string
	clientID string
	log      *slog.Logger
	metrics  *metrics

	mu     sync.Mutex
	cached map[branchName]branchRow // committed rows
	aside  quiet
}

type branchName struct {
	node string
	key  record.BranchKey
}

// branchRow is what a record needs to know of its branch: that nothing of it is news.
type branchRow struct{ id, epoch, gen int64 }

// Open opens the fold database at path, or makes one with Options.Store.Create.
func Open(ctx context.Context, path string, o Options) (*Fold, error) {
	if o.Logger == nil {
		o.Logger = o.Store.Logger
	}
	if o.Logger == nil {
		o.Logger = slog.New(slog.DiscardHandler)
	}
	if o.Name != "" {
		if err := record.CheckName(o.Name); err != nil {
			return nil, fmt.Errorf("open fold %s: name %w", path, err)
		}
	}
	store, err := sqlite.Open(ctx, path, schema(o.Name), o.Store)
	if err != nil {
		return nil, err
	}
	f := &Fold{store: store, log: o.Logger.With("component", "fold"), cached: map[branchName]branchRow{}}
	err = store.Reader().QueryRowContext(ctx, "SELECT name, client_id FROM meta WHERE id = 1").Scan(&f.name, &f.clientID)
	if err == nil && o.Name != "" && o.Name != f.name {
		err = fmt.Errorf("%w %s, not %s: a new name needs a new database", ErrOtherName, f.name, o.Name)
	}
	if err == nil {
		f.metrics, err = newMetrics(o.Metrics)
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("open fold %s: %w", path, err), store.Close())
	}
	return f, nil
}

func schema(name string) sqlite.Schema {
	return sqlite.Schema{
		Name: "Postrider fold", AppID: 0x50534644, Version: 2, Text: schemaText,
		Upgrades: map[int]sqlite.Fill{1: sqlite.FillClocks}, Locks: []string{".fold"},
		Init: func(ctx context.Context, tx *sqlite.Tx) error {
			suffix := strings.ToLower(rand.Text()[:8])
			host := name
			if name == "" {
				host = hostName()
				name = host + "-" + suffix
			}
			// The suffix is in the client id also when the name is given: two databases of one name would otherwise
			// cut each other off for ever.
			_, _, err := tx.Exec(ctx, `INSERT INTO meta (id, name, client_id, boot, clock_us, up_us, wall_us, steady_us, commit_seq)
				VALUES (1, ?, ?, '', ?, 0, ?, ?, 0)`, name, "postrider-fold-"+host+"-"+suffix, tx.NowUS, tx.WallUS, tx.SteadyUS)
			return err
		},
	}
}

// hostName is the machine's name as far as it can be part of a name.
func hostName() string {
	host, err := os.Hostname()
	if err != nil {
		host = ""
	}
	host = strings.Map(func(c rune) rune {
		switch {
		case 'a' <= c && c <= 'z', 'A' <= c && c <= 'Z', '0' <= c && c <= '9', c == '_', c == '-':
			return c
		}
		return '-'
	}, host)
	if host == "" {
		host = "fold"
	}
	return host[:min(len(host), 48)]
}

// Close ends the store. A Subscriber must have returned before.
func (f *Fold) Close() error { return f.store.Close() }

// Reader is the pool of read-only connections, for queries of one's own; schema.sql is what they can rely on.
func (f *Fold) Reader() *sql.DB { return f.store.Reader() }

// Name is what nodes know this fold by.
func (f *Fold) Name() string { return f.name }

// ClientID is the MQTT client id, the same for the life of the database.
func (f *Fold) ClientID() string { return f.clientID }

// Arrived is one message from an events topic: an event, or what could not be read as one.
type Arrived struct {
	Record record.Record // as record.ParseCloudEvent gives it; of Kind Event
	// Err says why there is no record. Then Topic and Payload are kept, the latter cut.
	Err     error
	Topic   string
	Payload []byte
}

// Arrive reads one message.
func Arrive(topics record.Topics, topic string, payload []byte) Arrived {
	a := Arrived{Topic: topic, Payload: payload}
	where, err := topics.Parse(topic)
	if err == nil {
		a.Record, err = record.ParseCloudEvent(payload)
	}
	if err == nil {
		err = where.Carries(&a.Record)
	}
	a.Err = err
	return a
}

// Result of one batch. The sum of its numbers is the length of the batch.
type Result struct {
	Stored     int // under keys that were new
	Duplicates int // that were already there, byte for byte
	Conflicts  int // with other content than what was there; both are kept
	Marks      int // kept beside a record or another mark, or records that came in place of a mark; no conflict
	Malformed  int // set aside
}

// conflict is one line for the log, written only once it is committed.
type conflict struct {
	at  branchName
	lsn int64
}

// batch is one run of Apply's unit: a unit may run twice, so all of it starts anew each time.
type batch struct {
	f         *Fold
	result    Result
	branches  map[branchName]branchRow
	conflicts []conflict
	topic     string // of the first malformed message
	reason    error
}

// Apply stores a batch in one transaction: nil only after its fsync. An error means that nothing of the batch is
// stored, or that nobody can know (sqlite.ErrUnknown): apply it again.
func (f *Fold) Apply(ctx context.Context, arrived []Arrived) (Result, error) {
	if len(arrived) == 0 {
		return Result{}, nil
	}
	var b *batch
	err := f.store.Write(ctx, func(ctx context.Context, tx *sqlite.Tx) error {
		b = &batch{f: f, branches: map[branchName]branchRow{}}
		return b.apply(ctx, tx, arrived)
	})
	if err != nil {
		return Result{}, fmt.Errorf("apply %d records: %w", len(arrived), err)
	}
	f.mu.Lock()
	if len(f.cached)+len(b.branches) > maxCached {
		clear(f.cached)
	}
	for name, row := range b.branches {
		f.cached[name] = row
	}
	tell := b.result.Malformed > 0 && f.aside.allow(time.Now())
	f.mu.Unlock()
	if tell {
		f.log.Warn("messages were set aside: no events of their topic", "malformed", b.result.Malformed, "first_topic", b.topic, "err", b.reason)
	}
	f.metrics.count(b.result)
	for i, c := range b.conflicts[:min(len(b.conflicts), maxConflictLines)] {
		f.log.Error("one record came with two contents; both are kept, the smaller hash is shown", "node", c.at.node,
			"tenant", c.at.key.Tenant, "run", c.at.key.Run, "branch", c.at.key.Branch, "lsn", c.lsn, "conflict", i+1, "of", len(b.conflicts))
	}
	return b.result, nil
}

func (b *batch) apply(ctx context.Context, tx *sqlite.Tx, arrived []Arrived) error {
	for i := range arrived {
		a := &arrived[i]
		var opened record.BranchOpened
		err := a.Err
		if err == nil {
			opened, err = check(&a.Record)
		}
		if err != nil {
			if err := b.setAside(ctx, tx, a, err); err != nil {
				return fmt.Errorf("set aside a message on %s: %w", a.Topic, err)
			}
			continue
		}
		if err := b.store(ctx, tx, &a.Record, opened); err != nil {
			return fmt.Errorf("store LSN %d of %s: %w", a.Record.LSN, a.Record.Source(), err)
		}
	}
	if b.result.Duplicates == 0 {
		return nil
	}
	_, _, err := tx.Exec(ctx, "UPDATE meta SET duplicates = duplicates + ? WHERE id = 1", b.result.Duplicates)
	return err
}

// check refuses what the codec cannot know to be wrong. opened is set for a branch.opened only.
func check(r *record.Record) (opened record.BranchOpened, err error) {
	if r.Kind != record.Event {
		return opened, errors.New("not an event")
	}
	if r.Type != record.TypeBranchOpened {
		return opened, nil
	}
	opened, err = record.ParseBranchOpened(r.Data)
	switch {
	case err != nil:
		return opened, err
	case opened.ForkLSN != r.LSN-1:
		return opened, fmt.Errorf("branch.opened: LSN %d does not follow fork_lsn %d", r.LSN, opened.ForkLSN)
	case opened.Parent == r.Key.Branch:
		return opened, errors.New("branch.opened: the branch is its own parent")
	}
	return opened, nil
}

func (b *batch) store(ctx context.Context, tx *sqlite.Tx, r *record.Record, opened record.BranchOpened) error {
	branch, err := b.branch(ctx, tx, r)
	if err != nil {
		return err
	}
	added, err := b.insert(ctx, tx, branch, r)
	if err != nil || !added {
		return err
	}
	switch {
	case r.LSN == 1:
		_, _, err = tx.Exec(ctx, "UPDATE branch SET known = 1 WHERE id = ?", branch)
	case opened.Parent != "":
		err = open(ctx, tx, branch, r, opened)
	}
	return err
}

// branch finds or makes the row of a record's branch and raises its epoch and gen, and the node's epoch, to the record's.
func (b *batch) branch(ctx context.Context, tx *sqlite.Tx, r *record.Record) (id int64, err error) {
	name := branchName{r.Node, r.Key}
	row, ok := b.branches[name]
	if !ok {
		b.f.mu.Lock()
		row, ok = b.f.cached[name]
		b.f.mu.Unlock()
	}
	if ok && r.Epoch <= row.epoch && r.Gen <= row.gen {
		return row.id, nil
	}
	var node, run int64
	if err = tx.Get(ctx, `INSERT INTO node (name, epoch) VALUES (?, ?)
		ON CONFLICT (name) DO UPDATE SET epoch = max(epoch, excluded.epoch) RETURNING id`,
		[]any{r.Node, r.Epoch}, &node); err != nil {
		return 0, err
	}
	if err = tx.Get(ctx, `INSERT INTO run (tenant, name, node) VALUES (?, ?, ?)
		ON CONFLICT (tenant, name, node) DO UPDATE SET node = excluded.node RETURNING id`,
		[]any{r.Key.Tenant, r.Key.Run, node}, &run); err != nil {
		return 0, err
	}
	if err = tx.Get(ctx, `INSERT INTO branch (run, ulid, epoch, gen) VALUES (?, ?, ?, ?)
		ON CONFLICT (run, ulid) DO UPDATE SET epoch = max(epoch, excluded.epoch), gen = max(gen, excluded.gen) RETURNING id, epoch, gen`,
		[]any{run, r.Key.Branch, r.Epoch, r.Gen}, &row.id, &row.epoch, &row.gen); err != nil {
		return 0, err
	}
	b.branches[name] = row
	return row.id, nil
}

// open makes a branch known by its branch.opened. Of several the smallest (LSN, content hash) counts.
func open(ctx context.Context, tx *sqlite.Tx, branch int64, r *record.Record, o record.BranchOpened) error {
	var parent int64
	if err := tx.Get(ctx, `INSERT INTO branch (run, ulid) SELECT run, ? FROM branch WHERE id = ?
		ON CONFLICT (run, ulid) DO UPDATE SET ulid = excluded.ulid RETURNING id`,
		[]any{o.Parent, branch}, &parent); err != nil {
		return err
	}
	hash := record.ContentHash(r)
	_, _, err := tx.Exec(ctx, `UPDATE branch SET known = 1, parent = ?, fork_step = ?, fork_lsn = ?, opened_lsn = ?, opened_hash = ?
		WHERE id = ? AND (opened_lsn IS NULL OR (opened_lsn, opened_hash) > (?, ?))`,
		parent, o.ForkStep, o.ForkLSN, r.LSN, hash[:], branch, r.LSN, hash[:])
	return err
}

// insert adds a record unless it is there already. The usual case, a new key, costs one statement and no hash.
func (b *batch) insert(ctx context.Context, tx *sqlite.Tx, branch int64, r *record.Record) (added bool, err error) {
	n, _, err := tx.Exec(ctx, insertRecord+" ON CONFLICT (branch, lsn) WHERE shown = 1 DO NOTHING", columns(tx, branch, r, true)...)
	if err != nil {
		return false, err
	}
	if n == 1 {
		b.result.Stored++
		return true, nil
	}
	return b.beside(ctx, tx, branch, r)
}

const insertRecord = `INSERT INTO record
	(branch, lsn, prevlsn, shown, mark, step, occurred_us, recorded_us, arrived_us, type, subject, correlation, causation, trace, data)
	VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)`

func columns(tx *sqlite.Tx, branch int64, r *record.Record, shown bool) []any {
	data := r.Data
	if data == nil {
		data = []byte("null") // as it would have travelled; a nil slice would bind NULL
	}
	return []any{branch, r.LSN, r.PrevLSN, bit(shown), bit(r.IsMark()), r.Step, r.Occurred, r.Recorded, tx.NowUS,
		r.Type, r.Subject, r.Correlation, r.Causation, r.Trace, data}
}

func bit(v bool) int64 {
	if v {
		return 1
	}
	return 0
}

// standing orders the contents of one key: the least of all that came is shown. A record stands before a mark. Content
// is what the hash says and the place in the lineage, which the hash does not cover.
type standing struct {
	mark    bool
	hash    [32]byte
	prevLSN int64
}

func standingOf(r *record.Record) standing {
	return standing{r.IsMark(), record.ContentHash(r), r.PrevLSN}
}

func (s standing) before(t standing) bool {
	if s.mark != t.mark {
		return t.mark
	}
	if s.hash != t.hash {
		return string(s.hash[:]) < string(t.hash[:])
	}
	return s.prevLSN < t.prevLSN
}

// beside handles a key that is taken: a duplicate adds nothing; anything else is kept, and what stands first is shown.
func (b *batch) beside(ctx context.Context, tx *sqlite.Tx, branch int64, r *record.Record) (added bool, err error) {
	there, shownID, err := contents(ctx, tx, branch, r.LSN)
	if err != nil {
		return false, err
	}
	own := standingOf(r)
	first, records := true, 0
	for _, s := range there {
		if s == own {
			b.result.Duplicates++
			return false, nil
		}
		first = first && own.before(s)
		records += int(1 - bit(s.mark))
	}
	if first {
		if _, _, err := tx.Exec(ctx, "UPDATE record SET shown = 0 WHERE id = ?", shownID); err != nil {
			return false, err
		}
	}
	if _, _, err := tx.Exec(ctx, insertRecord, columns(tx, branch, r, first)...); err != nil {
		return false, err
	}
	if own.mark || records == 0 {
		b.result.Marks++
		return true, nil
	}
	b.result.Conflicts++
	b.conflicts = append(b.conflicts, conflict{branchName{r.Node, r.Key}, r.LSN})
	return true, nil
}

// contents reads everything that is stored under one key.
func contents(ctx context.Context, tx *sqlite.Tx, branch, lsn int64) (list []standing, shownID int64, err error) {
	rows, err := tx.Query(ctx, `SELECT id, shown, prevlsn, occurred_us, type, subject, data FROM record WHERE branch = ?1 AND lsn = ?2 AND shown = 1
		UNION ALL SELECT id, shown, prevlsn, occurred_us, type, subject, data FROM record WHERE branch = ?1 AND lsn = ?2 AND shown = 0`, branch, lsn)
	if err != nil {
		return nil, 0, err
	}
	defer rows.Close()
	for rows.Next() {
		r := record.Record{Kind: record.Event}
		var id, shown int64
		if err := rows.Scan(&id, &shown, &r.PrevLSN, &r.Occurred, &r.Type, &r.Subject, &r.Data); err != nil {
			return nil, 0, err
		}
		if shown == 1 {
			shownID = id
		}
		list = append(list, standingOf(&r))
	}
	return list, shownID, rows.Err()
}

// setAside keeps what is no event. It is acknowledged like the others: the next delivery would not be better.
func (b *batch) setAside(ctx context.Context, tx *sqlite.Tx, a *Arrived, reason error) error {
	if b.result.Malformed++; b.reason == nil {
		b.topic, b.reason = a.Topic, reason
	}
	head := append([]byte{}, a.Payload[:min(len(a.Payload), maxMalformedPayload)]...)
	_, id, err := tx.Exec(ctx, "INSERT INTO malformed (topic, reason, at_us, size, payload) VALUES (?, ?, ?, ?, ?)",
		a.Topic, reason.Error(), tx.NowUS, len(a.Payload), head)
	if err != nil {
		return err
	}
	_, _, err = tx.Exec(ctx, "DELETE FROM malformed WHERE id <= ?", id-maxMalformed)
	return err
}
