package sqlite

import (
	"context"
	"crypto/rand"
	"database/sql"
	"database/sql/driver"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"runtime/debug"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	lib "modernc.org/sqlite/lib"
)

// Tx is a unit's view of the write transaction. It is good only inside the unit. Its statements ignore that a context
// ends: a cancelled one would take the neighbours' with it.
type Tx struct {
	// NowUS is the recorded time of everything in this transaction, in microseconds; within one boot it never goes back.
	NowUS int64
	// SteadyUS is what everything scheduled is compared with: microseconds that go on at the machine's pace, whatever is
	// done to the wall clock, also while no process runs. WallUS is what the wall clock says, for times that people give.
	SteadyUS, WallUS int64

	conn   *sql.Conn
	stmts  map[string]*sql.Stmt
	before func(query string) error
	rows   []*sql.Rows // given out in this unit
	gone   error       // ended the whole transaction
	failed bool        // a statement did, in this transaction
}

func (tx *Tx) stmt(ctx context.Context, query string) (*sql.Stmt, error) {
	if tx.gone != nil { // what ran now would commit by itself
		return nil, tx.gone
	}
	if tx.before != nil {
		if err := tx.before(query); err != nil {
			return nil, err
		}
	}
	if st := tx.stmts[query]; st != nil {
		return st, nil
	}
	st, err := tx.conn.PrepareContext(ctx, query)
	if err == nil {
		tx.stmts[query] = st
	}
	return st, err
}

// seen looks at a statement's error for those with which SQLite may have rolled back everything.
func (tx *Tx) seen(err error) error {
	tx.failed = tx.failed || code(err) != 0
	switch code(err) & 0xff {
	case lib.SQLITE_FULL, lib.SQLITE_IOERR, lib.SQLITE_NOMEM, lib.SQLITE_BUSY, lib.SQLITE_INTERRUPT:
		tx.gone = err
	}
	if errors.Is(err, driver.ErrBadConn) {
		tx.gone = err
	}
	return err
}

func uncancelled(ctx context.Context) context.Context {
	if ctx.Done() == nil {
		return ctx
	}
	return context.WithoutCancel(ctx)
}

// Exec runs one statement and returns how many rows it changed and the last rowid it inserted. Statements are prepared
// once and kept: query must come from a small fixed set.
func (tx *Tx) Exec(ctx context.Context, query string, args ...any) (changed, lastID int64, err error) {
	ctx = uncancelled(ctx)
	st, err := tx.stmt(ctx, query)
	if err != nil {
		return 0, 0, err
	}
	res, err := st.ExecContext(ctx, args...)
	if err != nil {
		return 0, 0, tx.seen(err)
	}
	changed, err = res.RowsAffected()
	if err != nil {
		return 0, 0, err
	}
	lastID, err = res.LastInsertId()
	return changed, lastID, err
}

// Query runs one query; the caller closes the rows before its next statement. What it leaves open ends with the unit.
func (tx *Tx) Query(ctx context.Context, query string, args ...any) (*sql.Rows, error) {
	ctx = uncancelled(ctx)
	st, err := tx.stmt(ctx, query)
	if err != nil {
		return nil, err
	}
	rows, err := st.QueryContext(ctx, args...)
	if err != nil {
		return nil, tx.seen(err)
	}
	if len(tx.rows) >= 16 && len(tx.rows) == cap(tx.rows) { // a unit may query often
		tx.rows = slices.DeleteFunc(tx.rows, func(r *sql.Rows) bool {
			_, err := r.Columns()
			return err != nil // closed
		})
	}
	tx.rows = append(tx.rows, rows)
	return rows, nil
}

// Get scans the first row of a query into dest; sql.ErrNoRows when there is none.
func (tx *Tx) Get(ctx context.Context, query string, args []any, dest ...any) error {
	ctx = uncancelled(ctx)
	st, err := tx.stmt(ctx, query)
	if err != nil {
		return err
	}
	return tx.seen(st.QueryRowContext(ctx, args...).Scan(dest...))
}

// endUnit closes what the unit left open: open rows hold a snapshot and keep the connection from closing.
func (tx *Tx) endUnit() {
	for i, rows := range tx.rows {
		_ = rows.Close() // its error is the statement's, which the unit could have seen
		tx.rows[i] = nil
	}
	tx.rows = tx.rows[:0]
}

// close closes the statements. database/sql does not, for those of one pinned connection, and SQLite keeps a connection
// with its locks and files for as long as one is left.
func (tx *Tx) close() error {
	tx.endUnit()
	var errs []error
	for _, st := range tx.stmts {
		errs = append(errs, st.Close())
	}
	clear(tx.stmts)
	return errors.Join(errs...)
}

// Unit is one all-or-nothing piece of a write transaction. It may run more than once and must keep nothing in memory
// before Write returned nil. It must not call Write: it runs on the goroutine that would answer.
type Unit func(ctx context.Context, tx *Tx) error

// Write runs unit in a transaction with whatever else is waiting and returns once its fate is known: nil only after the
// COMMIT that holds it was fsynced; the unit's own error if it refused. With any error but ErrUnknown nothing was changed.
// ctx bounds the wait for a place, not the commit.
func (s *Store) Write(ctx context.Context, unit Unit) error {
	if s.writer == nil {
		return fmt.Errorf("write %s: opened for reading", s.path)
	}
	err := s.writer.submit(ctx, unit)
	if full(err) {
		return fmt.Errorf("%w: %w", ErrFull, err)
	}
	return err
}

const (
	waiting = iota
	taken
	abandoned
)

type request struct {
	unit  Unit
	state atomic.Int32
	done  chan error // buffered: the writer never waits for its caller
}

// writer is the goroutine that owns the one writing connection.
type writer struct {
	path   string
	id     string // row of table writer
	o      Options
	log    *slog.Logger
	queue  chan *request
	quit   chan struct{}
	once   sync.Once
	ended  chan struct{}
	failed error // of the last close; read after ended

	clock *clock
	link
	trimAt   time.Time     // not before
	trimWait time.Duration // after the next failure

	since  atomic.Pointer[time.Time] // when the group in hand was taken; nil: none is
	broken atomic.Pointer[failure]   // that the store, and no unit, is to blame for; nil: the last commit succeeded

	duration   prometheus.Histogram
	units      prometheus.Histogram
	registered []prometheus.Collector
}

// failure is why nothing could be committed.
type failure struct {
	err error
	at  time.Time
}

func (w *writer) fail(err error) { w.broken.Store(&failure{err, w.o.Clocks.Wall()}) }

// link is one connection. It is pinned and lives until replaced; its own BEGIN and COMMIT are prepared like the rest.
type link struct {
	db   *sql.DB
	conn *sql.Conn
	tx   *Tx // statements of conn
}

func newWriter(ctx context.Context, path string, clock *clock, o Options) (*writer, error) {
	w := &writer{
		path: path, id: rand.Text(), o: o, log: o.Logger.With("component", "store"), clock: clock,
		queue: make(chan *request, 4096), quit: make(chan struct{}), ended: make(chan struct{}),
		duration: prometheus.NewHistogram(prometheus.HistogramOpts{
			Name: "postrider_commit_duration_seconds", Help: "Time of a group's transaction, BEGIN to COMMIT.",
			Buckets: prometheus.ExponentialBuckets(0.0001, 2, 16),
		}),
		units: prometheus.NewHistogram(prometheus.HistogramOpts{
			Name: "postrider_commit_units", Help: "Units in a group.", Buckets: prometheus.ExponentialBuckets(1, 2, 8),
		}),
	}
	l, err := w.connect(ctx)
	if err != nil {
		return nil, err
	}
	w.link = l
	if err := w.inherit(ctx); err != nil {
		return nil, errors.Join(err, l.close())
	}
	if err := clock.open(ctx, w.conn); err != nil {
		return nil, errors.Join(err, l.close())
	}
	if o.Metrics != nil {
		for _, c := range []prometheus.Collector{w.duration, w.units} {
			if err := o.Metrics.Register(c); err != nil {
				return nil, errors.Join(err, w.shut())
			}
			w.registered = append(w.registered, c)
		}
	}
	return w, nil
}

func (w *writer) connect(ctx context.Context) (l link, err error) {
	if err := w.o.fault("connect"); err != nil {
		return link{}, err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, l.close())
		}
	}()
	l.db = openPool(dsn(w.path, "rw", "&_busy_timeout=5000&_journal_mode=WAL&_synchronous=FULL&_foreign_keys=on&_dqs=0"), 1)
	if l.conn, err = l.db.Conn(ctx); err != nil {
		return l, err
	}
	var mode string
	var synchronous, keys int
	err = l.conn.QueryRowContext(ctx, `SELECT (SELECT journal_mode FROM pragma_journal_mode), (SELECT synchronous FROM pragma_synchronous),
		(SELECT foreign_keys FROM pragma_foreign_keys)`).Scan(&mode, &synchronous, &keys)
	if err != nil {
		return l, err
	}
	if mode != "wal" || synchronous != 2 || keys != 1 { // a file system without shared memory refuses WAL without an error
		return l, fmt.Errorf("journal_mode %s, synchronous %d, foreign_keys %d instead of wal, 2, 1", mode, synchronous, keys)
	}
	// From here on begin waits by itself: SQLite's back-off sleeps up to 100 ms at a time, starves an outside writer beside
	// a busy node, and knows nothing of Close.
	if _, err = l.conn.ExecContext(ctx, "PRAGMA busy_timeout = 0"); err != nil {
		return l, err
	}
	l.tx = &Tx{conn: l.conn, stmts: map[string]*sql.Stmt{}, before: w.o.BeforeStatement}
	return l, nil
}

// close rolls back what is open.
func (l *link) close() error {
	var errs []error
	if l.tx != nil {
		errs = append(errs, l.tx.close())
	}
	if l.conn != nil {
		errs = append(errs, l.conn.Close())
	}
	if l.db != nil {
		errs = append(errs, l.db.Close())
	}
	*l = link{}
	return errors.Join(errs...)
}

// replace takes a fresh connection, and closes the old one only then: as long as this process has one, SQLite's index of
// the WAL lives on and lists no frame of a failed COMMIT. Were the last connection gone, the next would read the WAL
// anew and take those frames for good (TestFailedFsyncIsNotIn).
func (w *writer) replace() error {
	_ = w.control("ROLLBACK") // mostly there is nothing to roll back any more
	l, err := w.connect(context.Background())
	if err != nil {
		return fmt.Errorf("reopen: %w", err)
	}
	if err := w.link.close(); err != nil {
		w.log.Debug("closing a broken connection", "err", err)
	}
	w.link = l
	return nil
}

// shut ends the writer for good.
func (w *writer) shut() error {
	for _, c := range w.registered { // not another store's, which Unregister could not tell from its own
		w.o.Metrics.Unregister(c)
	}
	return w.link.close()
}

// inherit makes durable what an earlier process left. For one that was killed inside its fsync the first commit is
// enough. After an fsync that failed it is not: the kernel holds those pages of the WAL as clean, no later fsync writes
// them, and whatever is appended behind them is lost with them at a power cut. So the WAL is copied to the main file and
// emptied. (Left open: a power cut during that very copy.)
//
// Only the first one to open a file takes such frames for good; a process that comes later uses the living index, where
// every frame was fsynced or already copied by the first. So it costs a short command beside a busy node a moment, not
// its life, and a reader in the way is no reason to fail.
func (w *writer) inherit(ctx context.Context) error {
	for deadline := time.Now().Add(100 * time.Millisecond); ; {
		err := w.checkpoint(ctx)
		if code(err)&0xff == lib.SQLITE_FULL {
			w.log.Warn("the disk is too full to empty the WAL", "err", err)
			return nil // else nobody could open the file to make room
		}
		if !errors.Is(err, errInUse) {
			return err
		}
		if time.Now().After(deadline) {
			w.log.Debug("the WAL is in use by another process and stays")
			return nil
		}
		if err := wait(ctx.Done(), time.Millisecond); err != nil {
			return context.Cause(ctx)
		}
	}
}

func (w *writer) submit(ctx context.Context, unit Unit) error {
	if err := ctx.Err(); err != nil {
		return context.Cause(ctx)
	}
	r := &request{unit: unit, done: make(chan error, 1)}
	select {
	case <-w.quit:
		return ErrClosed
	default:
	}
	select {
	case w.queue <- r:
	case <-w.quit:
		return ErrClosed
	case <-ctx.Done():
		return context.Cause(ctx)
	}
	select {
	case err := <-r.done:
		return err
	case <-ctx.Done():
		if r.state.CompareAndSwap(waiting, abandoned) {
			return context.Cause(ctx)
		}
	case <-w.ended:
		select {
		case err := <-r.done:
			return err
		default: // it came in after the writer looked for the last time
			return ErrClosed
		}
	}
	select {
	case err := <-r.done: // taken: only the COMMIT can tell
		return err
	case <-w.ended:
		select {
		case err := <-r.done:
			return err
		default:
			return ErrClosed
		}
	}
}

func (w *writer) close() error {
	w.once.Do(func() { close(w.quit) })
	<-w.ended
	return w.failed
}

func (w *writer) loop() {
	defer close(w.ended)                   // answers what still waits
	defer func() { w.failed = w.shut() }() // also when a unit called runtime.Goexit
	group := make([]*request, 0, w.o.MaxGroup)
	for {
		group = group[:0]
		select {
		case <-w.quit:
			return
		case r := <-w.queue:
			group = append(group, r)
		}
	fill:
		for len(group) < w.o.MaxGroup {
			select {
			case r := <-w.queue:
				group = append(group, r)
			default:
				break fill
			}
		}
		live := group[:0]
		for _, r := range group {
			if r.state.CompareAndSwap(waiting, taken) {
				live = append(live, r)
			}
		}
		now := w.o.Clocks.Wall()
		w.since.Store(&now)
		w.commit(live, false)
		clear(group) // an answered unit's memory is its caller's
		w.trim()
		w.since.Store(nil)
	}
}

// commit runs a group in one transaction. Units seldom fail, and savepoints cost a fifth of a small unit: SQLite keeps a
// copy of each page that changes. So a group runs without them first; when a unit fails, all is undone and runs again, each
// unit in a savepoint of its own. When one takes the whole transaction with it (a full disk, an I/O error), all run again
// one by one: also those it had refused, since they may have met rows of a neighbour that are gone now, and the culprit,
// since perhaps only the neighbours' rows left no room for it.
func (w *writer) commit(group []*request, savepoints bool) {
	if len(group) == 0 {
		return
	}
	start := time.Now()
	seq, err := w.begin()
	if err != nil {
		if !errors.Is(err, ErrClosed) {
			w.fail(err)
		}
		answer(group, err)
		return
	}
	refused := map[*request]error{}
	for _, r := range group {
		err := w.run(r, savepoints)
		var gone *goneError
		switch {
		// Also for a statement whose failure the unit kept to itself: only a savepoint's end tells whether all else of the
		// transaction is still there.
		case !savepoints && len(group) > 1 && (err != nil || w.tx.failed) && w.tx.gone == nil:
			w.abort()
			w.commit(group, true)
			return
		case errors.As(err, &gone):
			if w.tx.gone != nil {
				w.fail(gone.err)
			}
			w.abort()
			w.alone(group, gone.err)
			return
		case err != nil:
			refused[r] = err
		}
	}
	if len(refused) == len(group) {
		w.abort()
	} else if err := w.finish(); err != nil {
		err = fmt.Errorf("commit: %w", err)
		w.fail(err)
		if known(err) {
			w.abort()
			w.alone(group, err)
			return
		}
		in, rerr := w.resolve(seq, err)
		if rerr != nil {
			answer(group, fmt.Errorf("%w: %w", rerr, err))
			return
		}
		if !in {
			answer(group, err)
			return
		}
	}
	if len(refused) < len(group) {
		w.broken.Store(nil)
	}
	w.duration.Observe(time.Since(start).Seconds())
	w.units.Observe(float64(len(group)))
	for _, r := range group {
		r.done <- refused[r]
	}
}

// alone runs the units of a group that went down with err one by one; a unit that was alone has had its turn.
func (w *writer) alone(group []*request, err error) {
	if len(group) == 1 {
		group[0].done <- err
		return
	}
	for i := range group {
		w.commit(group[i:i+1], false)
	}
}

func answer(group []*request, err error) {
	for _, r := range group {
		r.done <- err
	}
}

// first is a process's first unit. Rows of writers gone for long are swept; one whose COMMIT is in doubt is never behind
// by both.
func (w *writer) first(ctx context.Context, tx *Tx) error {
	_, _, err := tx.Exec(ctx, "DELETE FROM writer WHERE at_us < ? AND commit_seq < (SELECT commit_seq - 1000 FROM meta WHERE id = 1)",
		tx.WallUS-(24*time.Hour).Microseconds())
	return err
}

// begin opens the transaction, retrying by itself while another process writes, and sets what every transaction sets.
func (w *writer) begin() (seq int64, err error) {
	if err := w.o.fault("begin"); err != nil {
		return 0, fmt.Errorf("begin: %w", err)
	}
	deadline := time.Now().Add(w.o.BusyTimeout)
	pause := 200 * time.Microsecond
	for replaced := false; ; {
		if err = w.control("BEGIN IMMEDIATE"); err == nil {
			break
		}
		if code(err)&0xff != lib.SQLITE_BUSY {
			if replaced {
				return 0, fmt.Errorf("begin: %w", err)
			}
			if rerr := w.replace(); rerr != nil {
				return 0, fmt.Errorf("begin: %w", errors.Join(err, rerr))
			}
			replaced = true
			continue
		}
		if time.Now().After(deadline) {
			return 0, ErrBusy
		}
		if wait(w.quit, pause) != nil {
			return 0, ErrClosed
		}
		pause = min(pause*5/4, 2*time.Millisecond)
	}
	ctx := context.Background()
	w.tx.gone, w.tx.failed = nil, false
	w.tx.before = nil
	wall, up := w.clock.read()
	err = w.tx.Get(ctx, nextTimes, []any{w.clock.Boot, wall, up}, &seq, &w.tx.NowUS, &w.tx.SteadyUS)
	if err == nil {
		w.clock.saw(w.tx.NowUS, w.tx.SteadyUS, up)
		w.tx.WallUS = wall
		_, _, err = w.tx.Exec(ctx, `INSERT INTO writer (id, commit_seq, at_us) VALUES (?, ?, ?)
			ON CONFLICT (id) DO UPDATE SET commit_seq = excluded.commit_seq, at_us = excluded.at_us`, w.id, seq, w.tx.NowUS)
	}
	w.tx.before = w.o.BeforeStatement
	if err != nil {
		w.abort()
		return 0, fmt.Errorf("begin: %w", err)
	}
	return seq, nil
}

// finish is the COMMIT.
func (w *writer) finish() error {
	if err := w.o.fault("commit"); err != nil {
		return err
	}
	if err := w.control("COMMIT"); err != nil {
		return err
	}
	return w.o.fault("committed")
}

// known reports whether a COMMIT that failed with err is surely not in: SQLite found no room for the last frame, which
// would have made it one, or did not even begin. Everything else may have come after that frame.
func known(err error) bool {
	switch code(err) & 0xff {
	case lib.SQLITE_FULL, lib.SQLITE_BUSY, lib.SQLITE_CONSTRAINT:
		return true
	}
	return false
}

// goneError: the unit's failure ended the whole transaction.
type goneError struct{ err error }

func (e *goneError) Error() string { return e.err.Error() }

// run runs one unit; without a savepoint of its own its failure is that of the transaction.
func (w *writer) run(r *request, savepoint bool) error {
	if savepoint {
		if err := w.control("SAVEPOINT unit"); err != nil {
			return &goneError{fmt.Errorf("savepoint: %w", err)}
		}
	}
	err := call(context.Background(), r.unit, w.tx)
	w.tx.endUnit()
	if gone := w.tx.gone; gone != nil && err == nil { // the unit kept it to itself
		err = gone
	}
	if err != nil && (!savepoint || w.tx.gone != nil) {
		return &goneError{err}
	}
	if !savepoint {
		return nil
	}
	if err == nil {
		if err := w.control("RELEASE unit"); err != nil {
			return &goneError{fmt.Errorf("release: %w", err)}
		}
		return nil
	}
	if rerr := w.control("ROLLBACK TO unit"); rerr != nil {
		return &goneError{err}
	}
	if rerr := w.control("RELEASE unit"); rerr != nil {
		return &goneError{err}
	}
	return err
}

// control runs a statement of the writer itself.
func (w *writer) control(statement string) error {
	st := w.tx.stmts[statement]
	if st == nil {
		var err error
		if st, err = w.conn.PrepareContext(context.Background(), statement); err != nil {
			return err
		}
		w.tx.stmts[statement] = st
	}
	_, err := st.ExecContext(context.Background())
	return err
}

// call turns a unit's panic into its error: one caller's bug must not end the process.
func call(ctx context.Context, unit Unit, tx *Tx) (err error) {
	defer func() {
		if p := recover(); p != nil {
			err = fmt.Errorf("panic in a write: %v\n%s", p, debug.Stack())
		}
	}()
	return unit(ctx, tx)
}

// abort rolls back; a connection that cannot is replaced.
func (w *writer) abort() {
	if w.control("ROLLBACK") == nil {
		return
	}
	// After SQLITE_FULL or SQLITE_IOERR no transaction may be active; a new BEGIN tells whether the connection is good.
	if w.control("BEGIN") == nil && w.control("ROLLBACK") == nil {
		return
	}
	if err := w.replace(); err != nil { // the next begin tries again
		w.log.Error("database cannot be reopened", "err", err)
	}
}

// resolve finds out whether the transaction numbered seq is in, after its COMMIT failed with cause. Until it can tell,
// nobody is answered.
func (w *writer) resolve(seq int64, cause error) (in bool, err error) {
	w.log.Error("fate of a commit is unknown; nothing is answered until it is", "err", cause)
	id, logged := w.id, time.Now()
	for pause := time.Millisecond; ; pause = min(pause*2, 2*time.Second) {
		if in, err = w.settle(id, seq); err == nil {
			w.log.Info("fate of the commit is known", "committed", in)
			return in, nil
		}
		if time.Since(logged) > time.Minute {
			w.log.Error("fate of a commit is still unknown", "err", err)
			logged = time.Now()
		}
		if wait(w.quit, pause) != nil {
			return false, ErrUnknown
		}
	}
}

// settle reads whether the writer called id has committed seq, and makes that answer final. If it is in, some of its
// frames may never have reached the disk although the kernel holds their pages as clean: they are copied to the main
// file, which waits for readers. If it is not, they may stand behind the end of the WAL and would come back if this
// process died: the next commit overwrites them, so one is made before anybody is answered. It has another name, for
// else its own failure could be read as a success of seq.
func (w *writer) settle(id string, seq int64) (in bool, err error) {
	if err := w.replace(); err != nil {
		return false, err
	}
	ctx := context.Background()
	var last int64
	if err := w.conn.QueryRowContext(ctx, "SELECT coalesce(max(commit_seq), 0) FROM writer WHERE id = ?", id).Scan(&last); err != nil {
		return false, err
	}
	in = last >= seq
	if in {
		if err := w.checkpoint(ctx); err != nil {
			return false, err
		}
	}
	w.id = rand.Text()
	if _, err := w.begin(); err != nil {
		return false, err
	}
	return in, w.finish()
}

// walLimit is above the 1,000 pages at which SQLite starts its own checkpoint, and a large transaction.
const walLimit = 6 << 20

// trim empties a WAL that outgrew its limit. SQLite's own checkpoint, after each commit, never waits: beside readers that
// overlap without end the WAL finds no moment to start over. This one holds writers up, at most 50 ms, until the readers
// of the moment are gone; new ones need no WAL meanwhile. A long reader makes it try less and less often. Units are
// answered before.
func (w *writer) trim() {
	now := time.Now()
	if w.conn == nil || now.Before(w.trimAt) {
		return
	}
	fi, err := os.Stat(w.path + "-wal") // opens nothing, so drops no locks
	if err != nil || fi.Size() <= walLimit {
		return
	}
	err = w.control("PRAGMA busy_timeout = 50")
	if err == nil {
		err = errors.Join(w.checkpoint(context.Background()), w.control("PRAGMA busy_timeout = 0"))
	}
	if err == nil {
		w.trimWait = 0
	} else {
		w.trimWait = min(max(2*w.trimWait, 100*time.Millisecond), 10*time.Second)
		w.trimAt = time.Now().Add(w.trimWait)
		w.log.Debug("the WAL stays long", "bytes", fi.Size(), "err", err)
	}
}

var errInUse = errors.New("the WAL is in use by a reader or another process")

// checkpoint copies the whole WAL to the main file, both fsynced, and empties it. It fails with errInUse when somebody is
// in the way for longer than the busy_timeout of the moment, mostly 0.
func (w *writer) checkpoint(ctx context.Context) error {
	if err := w.o.fault("checkpoint"); err != nil {
		return err
	}
	var busy, inLog, done int
	err := w.conn.QueryRowContext(ctx, "PRAGMA wal_checkpoint(TRUNCATE)").Scan(&busy, &inLog, &done)
	if busy != 0 || code(err)&0xff == lib.SQLITE_BUSY {
		return errInUse
	}
	return err
}
