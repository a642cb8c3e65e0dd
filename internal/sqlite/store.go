// Package sqlite opens Postrider's database files and owns their one writer. It is the only importer of the driver.
//
// All writes of a process go through one goroutine that takes what is waiting, runs each unit on its own (in a savepoint
// where one failed), commits once (synchronous=FULL) and only then answers each: nothing is answered that a power cut could
// undo. Readers are read-only connections of bounded lifetime. Every schema opened here has the tables meta (id = 1, boot,
// clock_us, up_us, wall_us, steady_us, skip_us, commit_seq) and writer (id, commit_seq, at_us), which the writer sets in
// every transaction.
//
// While a file is open here, nothing else in the process may open it: closing any other descriptor drops the POSIX locks
// that SQLite holds, and the next outside program may then delete the live WAL. On Linux the main file's locks belong to
// its descriptor and survive that (TestStrayCloseKeepsTheLocks); those of -shm never do.
package sqlite

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"log/slog"
	"net/url"
	"os"
	"path/filepath"
	"sync"
	"syscall"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"modernc.org/sqlite"
	lib "modernc.org/sqlite/lib"
)

var (
	// ErrNotFound: there is no such file, and the caller did not ask to make one.
	ErrNotFound = errors.New("no such database")
	// ErrForeign: the file is not a database of the wanted kind, or damaged, or not to be written.
	ErrForeign = errors.New("cannot use this database")
	// ErrAccess: this process may not do with the file, or with those that SQLite keeps beside it, what it has to; also an
	// ErrForeign. Reading too needs -shm to be written.
	ErrAccess = fmt.Errorf("%w: no access", ErrForeign)
	// ErrFull: the disk has no room for what was to be written. Nothing was changed.
	ErrFull = errors.New("the disk is full")
	// ErrNewer: the file was written by a later version.
	ErrNewer = errors.New("database of a newer version")
	// ErrOlder: the file was written by an earlier version, and opened for reading; opening it for writing upgrades it.
	ErrOlder = errors.New("database of an older version")
	// ErrBusy: another process held the write lock for too long. Nothing was changed.
	ErrBusy = errors.New("database is locked by another process")
	// ErrClosed: the store was closed before the unit ran. Nothing was changed.
	ErrClosed = errors.New("store is closed")
	// ErrGone: the file was removed or replaced while it was open.
	ErrGone = errors.New("the open database is gone")
	// ErrUnknown: the store was closed while the fate of a COMMIT was unknown. The unit may or may not be durable.
	ErrUnknown = errors.New("commit failed and its fate is unknown")
)

// minVersion is the first SQLite without the WAL-reset bug.
const minVersion = 3_051_003

// Schema is one kind of database file.
type Schema struct {
	Name  string // for error messages
	AppID int32  // PRAGMA application_id
	Text  string // CREATE statements
	// Version is PRAGMA user_version of Text.
	Version int
	// Upgrades are the steps from older versions, each to the next one, by the number of the older.
	Upgrades map[int]Fill
	// Locks are the endings of the lock files beside the database that processes hold which run on it for long. An upgrade
	// waits for none of them: they would go on in the words of the old version.
	Locks []string
	// Init fills a new file in the transaction that makes it; nil: nothing to fill.
	Init func(ctx context.Context, tx *Tx) error
}

// Options of Open; the zero value opens an existing file for reading and writing.
type Options struct {
	Create   bool // make the file when it is missing or empty
	ReadOnly bool // no writer: Write fails, and the file is not changed
	MaxGroup int  // units per commit; 0: 128
	Logger   *slog.Logger
	Metrics  prometheus.Registerer // nil: none
	// BusyTimeout is how long a unit waits for another process's transaction; 0: 5 s.
	BusyTimeout time.Duration
	// BeforeStatement runs before each statement of a unit; its error becomes the statement's. Fault tests only.
	BeforeStatement func(query string) error

	// Clocks are for tests.
	Clocks Clocks

	fault func(point string) error // nil: none; points are named where they are called
}

func (o Options) filled() Options {
	if o.MaxGroup == 0 {
		o.MaxGroup = 128
	}
	if o.BusyTimeout == 0 {
		o.BusyTimeout = 5 * time.Second
	}
	if o.Logger == nil {
		o.Logger = slog.New(slog.DiscardHandler)
	}
	o.Clocks = o.Clocks.filled()
	if o.fault == nil {
		o.fault = func(string) error { return nil }
	}
	return o
}

// setUp makes the driver's process-wide choices, before its first connection. Commits call fdatasync, as C SQLite's do;
// the main file's locks belong to its descriptor. Where either is missing (macOS) the driver's default stays.
var setUp = sync.OnceFunc(func() {
	_, _ = sqlite.OFDLocking(true)
	_, _ = sqlite.Fdatasync(true)
})

// Store is one open database file.
type Store struct {
	path   string
	file   os.FileInfo // of the file that was opened
	read   *sql.DB
	stmts  sync.Map // query text → *sql.Stmt of read
	clock  *clock
	writer *writer // nil when read-only
}

// Open opens the file at path and refuses, untouched, what is not of the wanted kind: ErrNotFound, ErrForeign,
// ErrNewer. A file of an older version is upgraded, unless it is opened for reading (ErrOlder), or a process of that
// version runs on it (ErrLocked). Its first act is a commit, so that whatever a process killed inside its fsync left behind
// is durable before anybody acts on it. Close ends the writer's goroutine.
func Open(ctx context.Context, path string, schema Schema, o Options) (*Store, error) {
	o = o.filled()
	if n := sqliteVersion(); n < minVersion {
		return nil, fmt.Errorf("open %s: SQLite %d has the WAL-reset bug; at least %d is needed", path, n, minVersion)
	}
	setUp()
	abs, err := realPath(path)
	if err != nil {
		return nil, fmt.Errorf("open %s: %w", path, err)
	}
	found, err := probe(ctx, path, abs, schema)
	if err != nil {
		return nil, err
	}
	switch {
	case found == older && o.ReadOnly:
		return nil, fmt.Errorf("%w: %s", ErrOlder, path)
	case found == older:
		err := upgrade(ctx, abs, schema, o)
		if errors.Is(err, ErrLocked) {
			return nil, fmt.Errorf("%s is in use by a process of an older version, and cannot be upgraded: %w", path, err)
		}
		if err != nil {
			return nil, unusable(path, err)
		}
		if _, err := probe(ctx, path, abs, schema); err != nil { // another process may have upgraded it further
			return nil, err
		}
	case found == filled:
	case o.Create && !o.ReadOnly:
		if err := create(ctx, abs, schema, o); err != nil {
			return nil, unusable(path, err)
		}
		// Another process may have filled it first, and with something else.
		if _, err := probe(ctx, path, abs, schema); err != nil {
			return nil, err
		}
	case found == missing:
		return nil, fmt.Errorf("%w: %s", ErrNotFound, path)
	default:
		return nil, fmt.Errorf("%w: %s is empty, not a %s database", ErrForeign, path, schema.Name)
	}
	s := &Store{path: abs, clock: &clock{Clocks: o.Clocks}, read: openPool(dsn(abs, "ro", "&_busy_timeout=5000&_query_only=on&_dqs=0"), 8)}
	s.read.SetConnMaxLifetime(time.Minute)
	if s.file, err = os.Stat(abs); err != nil {
		return nil, errors.Join(fmt.Errorf("open %s: %w", path, err), s.read.Close())
	}
	if o.ReadOnly {
		if err := s.clock.open(ctx, s.read); err != nil {
			return nil, errors.Join(unusable(path, err), s.read.Close())
		}
		return s, nil
	}
	if s.writer, err = newWriter(ctx, abs, s.clock, o); err != nil {
		return nil, errors.Join(unusable(path, err), s.read.Close())
	}
	if o.Metrics != nil {
		if err := o.Metrics.Register(s); err != nil {
			return nil, errors.Join(err, s.writer.shut(), s.read.Close())
		}
		s.writer.registered = append(s.writer.registered, s)
	}
	go s.writer.loop()
	if err := s.Write(ctx, s.writer.first); err != nil {
		return nil, errors.Join(unusable(path, err), s.Close())
	}
	return s, nil
}

// Close lets the group in hand end, answers what still waits with ErrClosed, and closes the file. The writer's connection
// is the last to go: as a reader's, it could not fold the WAL into the file.
func (s *Store) Close() error {
	var errs []error
	s.stmts.Range(func(_, st any) bool { errs = append(errs, st.(*sql.Stmt).Close()); return true })
	err := errors.Join(append(errs, s.read.Close())...)
	if s.writer != nil {
		err = errors.Join(err, s.writer.close())
	}
	return err
}

// Path is the file's absolute path, symbolic links resolved: one file has one name, also for the locks named after it.
func (s *Store) Path() string { return s.path }

// Boot names the machine's present boot. Where it is unknown, no other process has the same.
func (s *Store) Boot() string { return s.clock.Boot }

// Reader is the pool of read-only connections. A query holds a snapshot until its rows are closed, and the WAL grows
// meanwhile: read soon, under a context with a deadline.
func (s *Store) Reader() *sql.DB { return s.read }

// Query is Reader's QueryContext for what is asked all the time: the statement is prepared once and kept, so query must
// come from a small fixed set.
func (s *Store) Query(ctx context.Context, query string, args ...any) (*sql.Rows, error) {
	st, err := s.prepared(ctx, query)
	if err != nil {
		return nil, err
	}
	return st.QueryContext(ctx, args...)
}

// Get scans the first row of a query, kept like Query's, into dest; sql.ErrNoRows when there is none.
func (s *Store) Get(ctx context.Context, query string, args []any, dest ...any) error {
	st, err := s.prepared(ctx, query)
	if err != nil {
		return err
	}
	return st.QueryRowContext(ctx, args...).Scan(dest...)
}

func (s *Store) prepared(ctx context.Context, query string) (*sql.Stmt, error) {
	if st, ok := s.stmts.Load(query); ok {
		return st.(*sql.Stmt), nil
	}
	st, err := s.read.PrepareContext(ctx, query)
	if err != nil {
		return nil, err
	}
	if first, loaded := s.stmts.LoadOrStore(query, st); loaded {
		return first.(*sql.Stmt), st.Close()
	}
	return st, nil
}

type content int

const (
	missing content = iota
	empty           // also: a process died between making the file and filling it
	older           // filled by an earlier version
	filled          // with what is wanted
)

// probe says what the file holds, through SQLite, read-only, and refuses what is neither empty nor of the wanted kind.
func probe(ctx context.Context, path, abs string, schema Schema) (content, error) {
	fi, err := os.Stat(abs)
	switch {
	case errors.Is(err, os.ErrNotExist), errors.Is(err, syscall.ENOTDIR):
		if fi, err := os.Stat(filepath.Dir(abs)); err != nil || !fi.IsDir() {
			return 0, fmt.Errorf("%w: %s: there is no folder %s", ErrNotFound, path, filepath.Dir(abs))
		}
		return missing, nil
	case err != nil:
		return 0, fmt.Errorf("open %s: %w", path, err)
	case !fi.Mode().IsRegular():
		return 0, fmt.Errorf("%w: %s is not a regular file", ErrForeign, path)
	case fi.Size() == 0:
		return empty, nil
	case fi.Size() < 512: // SQLite takes a file of one byte for an empty one, and would overwrite it
		return 0, fmt.Errorf("%w: %s is not a database", ErrForeign, path)
	}
	// First without locks and WAL, because even a read-only connection leaves -wal and -shm beside somebody else's file
	// in WAL mode. This look may be out of date, so it only refuses.
	id, version, tables, err := look(ctx, abs, "&immutable=1")
	if err == nil || code(err)&0xff == lib.SQLITE_NOTADB {
		if err := refuse(path, schema, id, version, tables, err); err != nil {
			return 0, err
		}
	}
	id, version, tables, err = look(ctx, abs, "&_busy_timeout=5000")
	if err := refuse(path, schema, id, version, tables, err); err != nil {
		return 0, err
	}
	switch {
	case id == 0:
		return empty, nil
	case version < schema.Version:
		return older, nil
	}
	return filled, nil
}

func look(ctx context.Context, abs, params string) (id int32, version, tables int, err error) {
	db := openPool(dsn(abs, "ro", "&_query_only=on"+params), 1)
	defer db.Close()
	err = db.QueryRowContext(ctx, `SELECT (SELECT application_id FROM pragma_application_id), (SELECT user_version FROM pragma_user_version),
		(SELECT count(*) FROM sqlite_master)`).Scan(&id, &version, &tables)
	return id, version, tables, err
}

func refuse(path string, schema Schema, id int32, version, tables int, err error) error {
	switch {
	case code(err)&0xff == lib.SQLITE_NOTADB:
		return fmt.Errorf("%w: %s is not a database", ErrForeign, path)
	case err != nil:
		return unusable(path, err)
	case id == 0 && version == 0 && tables == 0:
		return nil
	case id != schema.AppID:
		return fmt.Errorf("%w: %s is not a %s database", ErrForeign, path, schema.Name)
	case version > schema.Version:
		return fmt.Errorf("%w: %s has schema %d, this program knows up to %d", ErrNewer, path, version, schema.Version)
	case version < schema.Version && schema.fills(version) == nil:
		return fmt.Errorf("%w: %s has schema %d, which this program cannot upgrade", ErrForeign, path, version)
	}
	return nil
}

// unusable tells a file that SQLite cannot work with (permissions, damage) from other failures to open it.
func unusable(path string, err error) error {
	if code(err)&0xff == lib.SQLITE_BUSY {
		return fmt.Errorf("open %s: %w", path, ErrBusy)
	}
	if full(err) {
		return fmt.Errorf("%w: open %s: %w", ErrFull, path, err)
	}
	if errors.Is(err, os.ErrPermission) { // of a lock file
		return fmt.Errorf("%w: %s: %w", ErrAccess, path, err)
	}
	switch code(err) & 0xff {
	case lib.SQLITE_READONLY, lib.SQLITE_CANTOPEN, lib.SQLITE_PERM, lib.SQLITE_AUTH:
		return fmt.Errorf("%w: %s: %w", ErrAccess, path, err)
	case lib.SQLITE_CORRUPT:
		return fmt.Errorf("%w: %s: %w", ErrForeign, path, err)
	}
	return fmt.Errorf("open %s: %w", path, err)
}

// Check fails with ErrGone when the path no longer leads to the file that was opened: what is written goes nowhere then.
func (s *Store) Check() error {
	now, err := os.Stat(s.path)
	if err == nil && os.SameFile(now, s.file) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("%w: %w", ErrGone, err)
	}
	return fmt.Errorf("%w: %s is another file now", ErrGone, s.path)
}

// create makes the file's content; a second process that came first wins.
func create(ctx context.Context, abs string, schema Schema, o Options) error {
	// Two that switch one file to WAL at once may both be told to go away, busy_timeout or not.
	for deadline := time.Now().Add(o.BusyTimeout); ; {
		err := fill(ctx, abs, schema, o)
		if code(err)&0xff != lib.SQLITE_BUSY || time.Now().After(deadline) {
			return err
		}
		if err := wait(ctx.Done(), 2*time.Millisecond); err != nil {
			return context.Cause(ctx)
		}
	}
}

// fill makes an empty file's content in one transaction, and leaves any other as it is.
func fill(ctx context.Context, abs string, schema Schema, o Options) error {
	db := openPool(dsn(abs, "rwc", "&_busy_timeout=5000&_auto_vacuum=INCREMENTAL&_journal_mode=WAL&_synchronous=FULL&_foreign_keys=on&_dqs=0"), 1)
	defer db.Close()
	conn, err := db.Conn(ctx)
	if err != nil {
		return err
	}
	defer conn.Close()
	if err := o.fault("made"); err != nil {
		return err
	}
	if _, err := conn.ExecContext(ctx, "BEGIN IMMEDIATE"); err != nil {
		return err
	}
	err = func() error {
		var tables int
		if err := conn.QueryRowContext(ctx, "SELECT count(*) FROM sqlite_master").Scan(&tables); err != nil || tables > 0 {
			return err
		}
		if _, err := conn.ExecContext(ctx, schema.Text); err != nil {
			return err
		}
		if schema.Init != nil {
			now := o.Clocks.Wall().UnixMicro()
			tx := &Tx{conn: conn, stmts: map[string]*sql.Stmt{}, NowUS: now, SteadyUS: now, WallUS: now}
			if err := errors.Join(schema.Init(ctx, tx), tx.close()); err != nil {
				return err
			}
		}
		_, err := conn.ExecContext(ctx, fmt.Sprintf("PRAGMA application_id = %d; PRAGMA user_version = %d", schema.AppID, schema.Version))
		return errors.Join(err, o.fault("filled"))
	}()
	if err != nil {
		_, rerr := conn.ExecContext(context.WithoutCancel(ctx), "ROLLBACK")
		return errors.Join(err, rerr)
	}
	_, err = conn.ExecContext(ctx, "COMMIT")
	return err
}

// realPath is path made absolute, with symbolic links resolved, also where the file itself is missing.
func realPath(path string) (string, error) {
	abs, err := filepath.Abs(path)
	if err != nil {
		return "", err
	}
	for range 40 { // as many links as Linux follows
		real, err := filepath.EvalSymlinks(abs)
		if err == nil {
			return real, nil
		}
		if errors.Is(err, syscall.ENOTDIR) {
			return abs, nil // the caller will find that out
		}
		if !errors.Is(err, os.ErrNotExist) {
			return "", err
		}
		target, err := os.Readlink(abs)
		if err != nil { // a missing file, no dangling link
			dir, err := filepath.EvalSymlinks(filepath.Dir(abs))
			if err != nil {
				return abs, nil // nor is there a folder
			}
			return filepath.Join(dir, filepath.Base(abs)), nil
		}
		if !filepath.IsAbs(target) {
			target = filepath.Join(filepath.Dir(abs), target)
		}
		abs = target
	}
	return "", fmt.Errorf("too many symbolic links")
}

var errStopped = errors.New("stopped")

// wait waits for d, or fails as soon as stop is closed.
func wait(stop <-chan struct{}, d time.Duration) error {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return nil
	case <-stop:
		return errStopped
	}
}

// dsn names the file as a URI: a plain path would make SQLite ignore mode.
func dsn(abs, mode, params string) string {
	u := url.URL{Scheme: "file", Path: abs}
	return u.String() + "?mode=" + mode + params
}

func openPool(dsn string, n int) *sql.DB {
	db, err := sql.Open("sqlite", dsn)
	if err != nil {
		panic(err) // only an unregistered driver
	}
	db.SetMaxOpenConns(n)
	db.SetMaxIdleConns(n)
	return db
}

// code is the driver's extended result code, or 0.
func code(err error) int {
	var e *sqlite.Error
	if errors.As(err, &e) {
		return e.Code()
	}
	return 0
}

// full reports whether there was no room, also for -shm, where SQLite calls it an I/O error.
func full(err error) bool {
	return code(err)&0xff == lib.SQLITE_FULL || code(err) == lib.SQLITE_IOERR_SHMSIZE
}

// IsConstraint reports whether err is a violated UNIQUE, CHECK or PRIMARY KEY. Such an error ends with its statement.
func IsConstraint(err error) bool { return code(err)&0xff == lib.SQLITE_CONSTRAINT }

func sqliteVersion() int { return lib.SQLITE_VERSION_NUMBER }
