package sqlite

import (
	"context"
	"crypto/rand"
	"database/sql"
	"errors"
	"fmt"
	"log/slog"
	"runtime/debug"
	"sync"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	lib "modernc.org/sqlite/lib"
)

// Tx is a unit's view of the write transaction. It is good only inside the unit.
type Tx struct {
	// NowUS is the recorded time of everything in this transaction, in microseconds; within one boot it never goes back.
	NowUS int64

	conn   *sql.Conn
	stmts  map[string]*sql.Stmt
	before func(query string) error
}

func (tx *Tx) stmt(ctx context.Context, query string) (*sql.Stmt, error) {
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

// Exec runs one statement and returns how many rows it changed and the last rowid it inserted. Statements are prepared
// once and kept: query must come from a small fixed set.
func (tx *Tx) Exec(ctx context.Context, query string, args ...any) (changed, lastID int64, err error) {
	st, err := tx.stmt(ctx, query)
	if err != nil {
		return 0, 0, err
	}
	res, err := st.ExecContext(ctx, args...)
	if err != nil {
		return 0, 0, err
	}
	changed, err = res.RowsAffected()
	if err != nil {
		return 0, 0, err
	}
	lastID, err = res.LastInsertId()
	return changed, lastID, err
}

// Query runs one query; the caller closes the rows before its next statement.
func (tx *Tx) Query(ctx context.Context, query string, args ...any) (*sql.Rows, error) {
	st, err := tx.stmt(ctx, query)
	if err != nil {
		return nil, err
	}
	return st.QueryContext(ctx, args...)
}

// Get scans the first row of a query into dest; sql.ErrNoRows when there is none.
func (tx *Tx) Get(ctx context.Context, query string, args []any, dest ...any) error {
	st, err := tx.stmt(ctx, query)
	if err != nil {
		return err
	}
	return st.QueryRowContext(ctx, args...).Scan(dest...)
}

// Unit is one all-or-nothing piece of a write transaction. It may run more than once and must keep nothing in memory
// before Write returned nil. Its context is never cancelled: a cancelled statement would take its neighbours with it.
type Unit func(ctx context.Context, tx *Tx) error

// Write runs unit in a transaction with whatever else is waiting and returns once its fate is known: nil only after the
// COMMIT that holds it was fsynced; the unit's own error if it refused. ctx bounds the wait for a place, not the commit.
func (s *Store) Write(ctx context.Context, unit Unit) error {
	if s.writer == nil {
		return fmt.Errorf("write %s: opened for reading", s.path)
	}
	return s.writer.submit(ctx, unit)
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
	boot   string
	o      Options
	log    *slog.Logger
	queue  chan *request
	quit   chan struct{}
	once   sync.Once
	ended  chan struct{}
	failed error // of the last close; read after ended

	db       *sql.DB
	conn     *sql.Conn
	tx       *Tx // statements of conn
	duration prometheus.Histogram
	units    prometheus.Histogram
}

func newWriter(ctx context.Context, path string, o Options) (*writer, error) {
	w := &writer{
		path: path, id: rand.Text(), boot: bootID(), o: o, log: o.Logger.With("component", "store"),
		queue: make(chan *request, 4096), quit: make(chan struct{}), ended: make(chan struct{}),
		duration: prometheus.NewHistogram(prometheus.HistogramOpts{
			Name: "postrider_commit_duration_seconds", Help: "Time of a group's transaction, BEGIN to COMMIT.",
			Buckets: prometheus.ExponentialBuckets(0.0001, 2, 16),
		}),
		units: prometheus.NewHistogram(prometheus.HistogramOpts{
			Name: "postrider_commit_units", Help: "Units in a group.", Buckets: prometheus.ExponentialBuckets(1, 2, 8),
		}),
	}
	if o.Metrics != nil {
		for _, c := range []prometheus.Collector{w.duration, w.units} {
			if err := o.Metrics.Register(c); err != nil {
				return nil, err
			}
		}
	}
	if err := w.open(ctx); err != nil {
		return nil, errors.Join(err, w.shut())
	}
	return w, nil
}

func (w *writer) open(ctx context.Context) error {
	// Busy is handled by begin: SQLite's own back-off starves an outside writer beside a busy node.
	w.db = openPool(dsn(w.path, "rw", "&_busy_timeout=5000&_journal_mode=WAL&_synchronous=FULL&_foreign_keys=on&_dqs=0"), 1)
	conn, err := w.db.Conn(ctx)
	if err != nil {
		return err
	}
	w.conn = conn
	w.tx = &Tx{conn: conn, stmts: map[string]*sql.Stmt{}, before: w.o.BeforeStatement}
	return nil
}

// shut closes the connection; an open transaction is rolled back by that.
func (w *writer) shut() error {
	var errs []error
	if w.conn != nil {
		for _, st := range w.tx.stmts {
			errs = append(errs, st.Close())
		}
		errs = append(errs, w.conn.Close())
		w.conn, w.tx = nil, nil
	}
	if w.db != nil {
		errs = append(errs, w.db.Close())
		w.db = nil
	}
	return errors.Join(errs...)
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
	defer close(w.ended)
	group := make([]*request, 0, w.o.MaxGroup)
	for {
		group = group[:0]
		select {
		case r := <-w.queue:
			group = append(group, r)
		case <-w.quit:
			w.end()
			return
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
		w.commit(live)
	}
}

// end answers what still waits and closes the connection.
func (w *writer) end() {
	for {
		select {
		case r := <-w.queue:
			r.done <- ErrClosed
			continue
		default:
		}
		break
	}
	w.failed = w.shut()
}

// commit runs a group in one transaction. When one unit takes the whole transaction with it (a full disk, an I/O
// error), the others run again one by one.
func (w *writer) commit(group []*request) {
	if len(group) == 0 {
		return
	}
	start := time.Now()
	seq, err := w.begin()
	if err != nil {
		answer(group, err)
		return
	}
	ctx := context.Background()
	refused := map[*request]error{}
	for i, r := range group {
		err := w.run(ctx, r, len(group) > 1)
		if err == nil {
			continue
		}
		var gone *goneError
		if !errors.As(err, &gone) {
			refused[r] = err
			continue
		}
		w.abort(ctx)
		r.done <- gone.err
		for _, other := range append(append([]*request{}, group[:i]...), group[i+1:]...) {
			if err := refused[other]; err != nil {
				other.done <- err
				continue
			}
			w.commit([]*request{other})
		}
		return
	}
	if len(refused) == len(group) {
		w.abort(ctx)
	} else if _, err := w.conn.ExecContext(ctx, "COMMIT"); err != nil {
		w.log.Error("commit failed; reading back what is durable", "err", err)
		in, rerr := w.resolve(seq)
		if rerr != nil {
			answer(group, fmt.Errorf("%w: %w", rerr, err))
			return
		}
		if !in {
			answer(group, fmt.Errorf("commit: %w", err))
			return
		}
	}
	w.duration.Observe(time.Since(start).Seconds())
	w.units.Observe(float64(len(group)))
	for _, r := range group {
		r.done <- refused[r]
	}
}

// first is a process's first unit. A recorded clock belongs to one boot: a machine that starts again does not inherit a
// time that lay in the future. Rows of writers gone for a day are swept.
func (w *writer) first(ctx context.Context, tx *Tx) error {
	wall := time.Now()
	if _, _, err := tx.Exec(ctx, "UPDATE meta SET boot = ?, clock_us = ? WHERE id = 1 AND boot <> ?", w.boot, wall.UnixMicro(), w.boot); err != nil {
		return err
	}
	_, _, err := tx.Exec(ctx, "DELETE FROM writer WHERE at_us < ? AND id <> ?", wall.Add(-24*time.Hour).UnixMicro(), w.id)
	return err
}

func answer(group []*request, err error) {
	for _, r := range group {
		r.done <- err
	}
}

// begin opens the transaction, retrying by itself while another process writes, and sets what every transaction sets.
func (w *writer) begin() (seq int64, err error) {
	ctx := context.Background()
	if w.conn == nil { // a resolve gave up only because the store was closing
		return 0, ErrClosed
	}
	deadline := time.Now().Add(w.o.BusyTimeout)
	pause := 200 * time.Microsecond
	for {
		if _, err = w.conn.ExecContext(ctx, "BEGIN IMMEDIATE"); err == nil {
			break
		}
		if code(err)&0xff != lib.SQLITE_BUSY {
			return 0, fmt.Errorf("begin: %w", err)
		}
		if time.Now().After(deadline) {
			return 0, ErrBusy
		}
		t := time.NewTimer(pause)
		select {
		case <-t.C:
		case <-w.quit:
			t.Stop()
			return 0, ErrClosed
		}
		pause = min(pause*5/4, 2*time.Millisecond)
	}
	w.tx.before = nil
	err = w.tx.Get(ctx, "UPDATE meta SET commit_seq = commit_seq + 1, clock_us = max(clock_us, ?) WHERE id = 1 RETURNING commit_seq, clock_us",
		[]any{time.Now().UnixMicro()}, &seq, &w.tx.NowUS)
	if err == nil {
		_, _, err = w.tx.Exec(ctx, `INSERT INTO writer (id, commit_seq, at_us) VALUES (?, ?, ?)
			ON CONFLICT (id) DO UPDATE SET commit_seq = excluded.commit_seq, at_us = excluded.at_us`, w.id, seq, w.tx.NowUS)
	}
	w.tx.before = w.o.BeforeStatement
	if err != nil {
		w.abort(ctx)
		return 0, fmt.Errorf("begin: %w", err)
	}
	return seq, nil
}

// goneError: the unit's failure ended the whole transaction.
type goneError struct{ err error }

func (e *goneError) Error() string { return e.err.Error() }

// run runs one unit. Only in a group is a savepoint worth its price: alone, the unit is the transaction.
func (w *writer) run(ctx context.Context, r *request, grouped bool) error {
	if grouped {
		if err := w.control(ctx, "SAVEPOINT unit"); err != nil {
			return &goneError{fmt.Errorf("savepoint: %w", err)}
		}
	}
	err := call(ctx, r.unit, w.tx)
	if !grouped {
		if err != nil {
			return &goneError{err}
		}
		return nil
	}
	if err == nil {
		if err := w.control(ctx, "RELEASE unit"); err != nil {
			return &goneError{fmt.Errorf("release: %w", err)}
		}
		return nil
	}
	// SQLITE_FULL and SQLITE_IOERR may have rolled back everything: then there is no savepoint to return to.
	if rerr := w.control(ctx, "ROLLBACK TO unit"); rerr != nil {
		return &goneError{err}
	}
	if rerr := w.control(ctx, "RELEASE unit"); rerr != nil {
		return &goneError{err}
	}
	return err
}

func (w *writer) control(ctx context.Context, statement string) error {
	before := w.tx.before
	w.tx.before = nil
	_, _, err := w.tx.Exec(ctx, statement)
	w.tx.before = before
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
func (w *writer) abort(ctx context.Context) {
	if w.conn == nil {
		return
	}
	if _, err := w.conn.ExecContext(ctx, "ROLLBACK"); err == nil {
		return
	}
	// No transaction is active after SQLITE_FULL or SQLITE_IOERR; a new BEGIN tells whether the connection is good.
	if _, err := w.conn.ExecContext(ctx, "BEGIN"); err == nil {
		if _, err := w.conn.ExecContext(ctx, "ROLLBACK"); err == nil {
			return
		}
	}
	w.reopen(ctx)
}

// reopen gets a fresh connection, trying until it has one or the store closes.
func (w *writer) reopen(ctx context.Context) bool {
	for pause := 50 * time.Millisecond; ; pause = min(pause*2, 2*time.Second) {
		if err := w.shut(); err != nil {
			w.log.Debug("closing a broken connection", "err", err)
		}
		err := w.open(ctx)
		if err == nil {
			return true
		}
		w.log.Error("database cannot be opened", "err", err)
		select {
		case <-w.quit:
			w.shut()
			return false
		case <-time.After(pause):
		}
	}
}

// resolve finds out whether the transaction numbered seq is in, after its COMMIT failed. The kernel may hold pages of
// the WAL as clean although they never reached the disk; the checkpoint writes their content to the main file and
// fsyncs that. Until it succeeds nobody is answered.
func (w *writer) resolve(seq int64) (in bool, err error) {
	ctx := context.Background()
	for pause := 50 * time.Millisecond; ; pause = min(pause*2, 2*time.Second) {
		if !w.reopen(ctx) {
			return false, ErrUnknown
		}
		var last int64
		err := w.checkpoint(ctx)
		if err == nil {
			err = w.conn.QueryRowContext(ctx, "SELECT commit_seq FROM writer WHERE id = ?", w.id).Scan(&last)
			if errors.Is(err, sql.ErrNoRows) {
				last, err = 0, nil
			}
		}
		if err == nil {
			return last >= seq, nil
		}
		w.log.Error("fate of a commit is unknown; nothing is answered until it is", "err", err)
		select {
		case <-w.quit:
			return false, ErrUnknown
		case <-time.After(pause):
		}
	}
}

func (w *writer) checkpoint(ctx context.Context) error {
	var busy, inLog, done int
	if err := w.conn.QueryRowContext(ctx, "PRAGMA wal_checkpoint(TRUNCATE)").Scan(&busy, &inLog, &done); err != nil {
		return err
	}
	if busy != 0 {
		return errors.New("checkpoint is held up by a reader")
	}
	return nil
}
