package sqlite

import (
	"bytes"
	"context"
	"database/sql"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"modernc.org/sqlite"
)

func writeBytes(t *testing.T, path string, b []byte) {
	t.Helper()
	if err := os.WriteFile(path, b, 0o600); err != nil {
		t.Fatal(err)
	}
}

// foreign makes somebody else's database.
func foreign(statements ...string) func(t *testing.T, path string) {
	return func(t *testing.T, path string) {
		t.Helper()
		db, err := sql.Open("sqlite", dsn(path, "rwc", ""))
		if err != nil {
			t.Fatal(err)
		}
		for _, st := range statements {
			if _, err := db.ExecContext(t.Context(), st); err != nil {
				t.Fatal(err)
			}
		}
		if err := db.Close(); err != nil {
			t.Fatal(err)
		}
	}
}

func TestOpenRefusesUntouched(t *testing.T) {
	ours := fmt.Sprintf("PRAGMA application_id = %d", rowsSchema.AppID)
	for _, c := range []struct {
		name string
		make func(t *testing.T, path string)
		want error
		says string
	}{
		{"text", func(t *testing.T, path string) { writeBytes(t, path, []byte("dear diary\n")) }, ErrForeign, "is not a database"},
		{"one byte", func(t *testing.T, path string) { writeBytes(t, path, []byte("x")) }, ErrForeign, "is not a database"},
		{"long text", func(t *testing.T, path string) { writeBytes(t, path, bytes.Repeat([]byte("x"), 10_000)) }, ErrForeign, "is not a database"},
		{"zeros", func(t *testing.T, path string) { writeBytes(t, path, make([]byte, 4096)) }, ErrForeign, "is not a database"},
		{"folder", func(t *testing.T, path string) { _ = os.Mkdir(path, 0o700) }, ErrForeign, "is not a regular file"},
		{"pipe", func(t *testing.T, path string) { _ = syscall.Mkfifo(path, 0o600) }, ErrForeign, "is not a regular file"},
		{"foreign", foreign("CREATE TABLE theirs (x)"), ErrForeign, "is not a rows database"},
		{"foreign in WAL mode", foreign("PRAGMA journal_mode = WAL", "CREATE TABLE theirs (x)"), ErrForeign, "is not a rows database"},
		{"foreign with an id", foreign("PRAGMA application_id = 7", "CREATE TABLE theirs (x)"), ErrForeign, "is not a rows database"},
		{"foreign with a version only", foreign("PRAGMA user_version = 3"), ErrForeign, "is not a rows database"},
		{"newer", foreign(ours, "PRAGMA user_version = 4", "CREATE TABLE later (x)"), ErrNewer, "has schema 4, this program knows up to 3"},
		{"newer in WAL mode", foreign(ours, "PRAGMA user_version = 4", "PRAGMA journal_mode = WAL"), ErrNewer, "has schema 4"},
		{"older", foreign(ours, "PRAGMA user_version = 2", "CREATE TABLE earlier (x)"), ErrForeign, "has schema 2, which"},
	} {
		t.Run(c.name, func(t *testing.T) {
			path := newPath(t)
			c.make(t, path)
			before := snapshot(t, filepath.Dir(path))
			for _, o := range []Options{{}, {Create: true}, {ReadOnly: true}} {
				_, err := Open(t.Context(), path, rowsSchema, o)
				if !errors.Is(err, c.want) || !strings.Contains(err.Error(), c.says) || !strings.Contains(err.Error(), path) {
					t.Errorf("%+v: %v", o, err)
				}
			}
			if after := snapshot(t, filepath.Dir(path)); after != before {
				t.Errorf("touched: before\n%s\nafter\n%s", before, after)
			}
		})
	}
}

// snapshot is the folder's names, kinds and contents.
func snapshot(t *testing.T, dir string) string {
	t.Helper()
	var b strings.Builder
	entries, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range entries {
		fmt.Fprint(&b, e.Name(), " ", e.Type())
		if e.Type().IsRegular() {
			content, err := os.ReadFile(filepath.Join(dir, e.Name()))
			if err != nil {
				t.Fatal(err)
			}
			fmt.Fprintf(&b, " %x", content[:min(len(content), 200)])
			info, err := e.Info()
			if err != nil {
				t.Fatal(err)
			}
			fmt.Fprint(&b, " ", len(content), " ", info.ModTime().UnixNano())
		}
		fmt.Fprintln(&b)
	}
	return b.String()
}

func TestOpenOfNothingMakesNothing(t *testing.T) {
	dir := t.TempDir()
	there := filepath.Join(dir, "empty.db")
	writeBytes(t, there, nil)
	before := snapshot(t, dir)
	for path, want := range map[string]error{
		filepath.Join(dir, "missing.db"):         ErrNotFound,
		filepath.Join(dir, "missing", "test.db"): ErrNotFound,
		filepath.Join(there, "test.db"):          ErrNotFound,
		there:                                    ErrForeign,
	} {
		for _, o := range []Options{{}, {ReadOnly: true}, {ReadOnly: true, Create: true}} {
			if _, err := Open(t.Context(), path, rowsSchema, o); !errors.Is(err, want) {
				t.Errorf("%s, %+v: %v", path, o, err)
			}
		}
	}
	if _, err := Open(t.Context(), filepath.Join(dir, "missing", "test.db"), rowsSchema, Options{Create: true}); !errors.Is(err, ErrNotFound) {
		t.Errorf("without its folder: %v", err)
	}
	if after := snapshot(t, dir); after != before {
		t.Errorf("before\n%s\nafter\n%s", before, after)
	}
	if s := open(t, there, Options{Create: true}); commitSeq(t, s) != 1 {
		t.Error("an empty file was not filled")
	}
}

func TestOpenTakesAnyFileName(t *testing.T) {
	t.Chdir(t.TempDir())
	for _, name := range []string{
		"a b.db", "what?.db", "mode=ro&x?mode=memory", "#1.db", "100%.db", "%41.db", "a:b.db", "file:x.db", ":memory:", "-leading.db",
		"größe-数据.db", "'quoted\".db", `back\slash.db`, "+plus;semi.db", "~", "new\nline.db", "\xff\xfe.db",
	} {
		s, err := Open(t.Context(), name, rowsSchema, Options{Create: true})
		if err != nil {
			t.Errorf("%q: %v", name, err)
			continue
		}
		err = s.Write(t.Context(), insert(1))
		if err := errors.Join(err, s.Close()); err != nil {
			t.Errorf("%q: %v", name, err)
		}
		if fi, err := os.Stat(name); err != nil || fi.Size() == 0 {
			t.Errorf("%q is not the file: %v", name, err)
		}
		if s, err = Open(t.Context(), "./"+name, rowsSchema, Options{}); err != nil {
			t.Errorf("%q again: %v", name, err)
			continue
		}
		if !has(t, s, 1) {
			t.Errorf("%q: its row is missing", name)
		}
		if err := s.Close(); err != nil {
			t.Error(err)
		}
		if err := os.Remove(name); err != nil {
			t.Error(err)
		}
	}
	if left, err := os.ReadDir("."); err != nil || len(left) != 0 {
		t.Errorf("left behind: %v, %v", left, err)
	}
}

// Locks are named after the file: it must not have two names.
func TestSymbolicLinksLeadToOneName(t *testing.T) {
	dir := t.TempDir()
	dir, err := filepath.EvalSymlinks(dir)
	if err != nil {
		t.Fatal(err)
	}
	for _, err := range []error{
		os.Mkdir(filepath.Join(dir, "data"), 0o700),
		os.Symlink("data", filepath.Join(dir, "link")),
		os.Symlink("link/real.db", filepath.Join(dir, "dangling.db")),
		os.Symlink("dangling.db", filepath.Join(dir, "twice.db")),
		os.Symlink("loop.db", filepath.Join(dir, "loop.db")),
	} {
		if err != nil {
			t.Fatal(err)
		}
	}
	text, err := schemaText()
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"twice.db", "dangling.db", "link/real.db", "data/real.db"} {
		path := filepath.Join(dir, name)
		s, err := Open(t.Context(), path, NodeSchema(text, "n1", path), Options{Create: true})
		if err != nil {
			t.Fatal(name, err)
		}
		if want := filepath.Join(dir, "data", "real.db"); s.Path() != want {
			t.Errorf("%s is %s, want %s", name, s.Path(), want)
		}
		if err := s.Close(); err != nil {
			t.Error(err)
		}
	}
	entries, err := os.ReadDir(filepath.Join(dir, "data"))
	if err != nil || len(entries) != 2 { // the file and its epoch
		t.Errorf("in the folder: %v, %v", entries, err)
	}
	if _, err := Open(t.Context(), filepath.Join(dir, "loop.db"), rowsSchema, Options{Create: true}); err == nil {
		t.Error("a loop of links was opened")
	}
}

func TestKilledWhileCreatingIsCreatedAgain(t *testing.T) {
	for _, point := range []string{"made", "filled"} {
		path := newPath(t)
		var exit *exec.ExitError
		cmd := command(t, "die", path)
		cmd.Env = append(cmd.Env, "POSTRIDER_TEST_KILL_AT="+point)
		if err := cmd.Run(); !errors.As(err, &exit) || exit.Exited() {
			t.Fatalf("%s: not killed: %v", point, err)
		}
		if fi, err := os.Stat(path); err != nil || fi.Size() == 0 {
			t.Fatalf("%s: killed too early: %v", point, err)
		}
		if _, err := Open(t.Context(), path, rowsSchema, Options{}); !errors.Is(err, ErrForeign) {
			t.Errorf("%s: without Create: %v", point, err)
		}
		s := open(t, path, Options{Create: true})
		if err := s.Write(t.Context(), insert(1)); err != nil {
			t.Errorf("%s: %v", point, err)
		}
	}
}

func TestProcessesThatCreateOneFileAtOnceAgree(t *testing.T) {
	for range 5 {
		path := newPath(t)
		const n = 6
		var goes []func()
		nodes := map[string]bool{}
		var all []func() string
		for range n {
			lines, _, goOn := started(t, "create", path)
			wantLine(t, lines, "ready")
			goes = append(goes, goOn)
			all = append(all, func() string { return wantLine(t, lines, "node n1 ") })
		}
		for _, goOn := range goes {
			goOn()
		}
		for _, line := range all {
			nodes[line()] = true
		}
		if len(nodes) != 1 {
			t.Errorf("they made %v", nodes)
		}
	}
}

func TestFileFilledByAnotherKindMeanwhileIsRefused(t *testing.T) {
	path := newPath(t)
	_, err := Open(t.Context(), path, rowsSchema, Options{Create: true, fault: func(point string) error {
		if point != "made" {
			return nil
		}
		s, err := openNode(t, path, Options{Create: true})
		return errors.Join(err, s.Close())
	}})
	if !errors.Is(err, ErrForeign) {
		t.Errorf("got %v", err)
	}
	if n := nodeOf(t, path); n.Name != "n1" {
		t.Errorf("the node is %+v", n)
	}
}

func TestConnectionsAreAsTheyMustBe(t *testing.T) {
	s := newStore(t, Options{})
	err := s.Write(t.Context(), func(ctx context.Context, tx *Tx) error {
		for pragma, want := range map[string]string{"journal_mode": "wal", "synchronous": "2", "foreign_keys": "1", "query_only": "0", "auto_vacuum": "2"} {
			var got string
			if err := tx.Get(ctx, "PRAGMA "+pragma, nil, &got); err != nil || got != want {
				t.Errorf("the writer's %s is %s, want %s; %v", pragma, got, want, err)
			}
		}
		_, _, err := tx.Exec(ctx, `SELECT "no such column"`)
		if err == nil {
			t.Error("a misspelt name is a string")
		}
		return nil
	})
	if err != nil {
		t.Error(err)
	}
	var conns []*sql.Conn
	for range 8 {
		c, err := s.Reader().Conn(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		conns = append(conns, c)
	}
	for i, c := range conns {
		for _, st := range []string{"INSERT INTO row (id) VALUES (1)", "CREATE TABLE x (y)", "PRAGMA user_version = 9", "PRAGMA query_only = 0; INSERT INTO row (id) VALUES (1)"} {
			if _, err := c.ExecContext(t.Context(), st); err == nil {
				t.Errorf("reader %d: %s went through", i, st)
			}
		}
	}
	// A reader's pool has a bound, which a wait for a connection shows.
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	if _, err := s.Reader().Conn(ctx); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("a ninth connection: %v", err)
	}
	if has := s.writer.db.Stats().OpenConnections; has != 1 {
		t.Errorf("the writer has %d connections", has)
	}
	if sqlite.OFDLockingEnabled() != true || sqlite.FdatasyncEnabled() != true {
		t.Error("the driver's process-wide choices are not made")
	}
}

func TestReadersSeeOnlyWhatIsCommitted(t *testing.T) {
	s := newStore(t, Options{})
	err := s.Write(t.Context(), func(ctx context.Context, tx *Tx) error {
		if err := insert(1)(ctx, tx); err != nil {
			return err
		}
		if has(t, s, 1) {
			t.Error("visible before its COMMIT")
		}
		return nil
	})
	if err != nil || !has(t, s, 1) {
		t.Errorf("not visible after its COMMIT: %v", err)
	}
}

func TestOpenForReadingChangesNothing(t *testing.T) {
	path := newPath(t)
	s, err := Open(t.Context(), path, rowsSchema, Options{Create: true})
	if err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(s.Write(t.Context(), insert(1)), s.Close()); err != nil {
		t.Fatal(err)
	}
	before, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	r := open(t, path, Options{ReadOnly: true})
	if !has(t, r, 1) {
		t.Error("the row is missing")
	}
	if r.Write(t.Context(), insert(2)) == nil || barrier(t, r) == nil {
		t.Error("a store opened for reading wrote")
	}
	after, err := os.ReadFile(path)
	if err != nil || !bytes.Equal(before, after) {
		t.Errorf("the file changed: %v", err)
	}
}

func TestCloseLeavesOneFile(t *testing.T) {
	path := newPath(t)
	s, err := Open(t.Context(), path, rowsSchema, Options{Create: true})
	if err != nil {
		t.Fatal(err)
	}
	if err := s.Write(t.Context(), insert(1)); err != nil {
		t.Error(err)
	}
	if !has(t, s, 1) { // a reader has been there
		t.Error("the row is missing")
	}
	if err := s.Close(); err != nil {
		t.Error(err)
	}
	if entries, err := os.ReadDir(filepath.Dir(path)); err != nil || len(entries) != 1 {
		t.Errorf("left behind: %v, %v", entries, err)
	}
}

// Something in this process opens and closes the file. An outside program of before SQLite 3.51 looks at nothing but
// these locks to see whether it is the last one, which deletes the WAL.
func TestStrayCloseKeepsTheLocks(t *testing.T) {
	s := newStore(t, Options{})
	if _, err := os.ReadFile(s.Path()); err != nil {
		t.Fatal(err)
	}
	if out, err := command(t, "pass", s.Path()).Output(); err != nil {
		t.Errorf("%v: %s", err, out)
	}
}

func TestOpenGivesUpWithItsContext(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := Open(ctx, newPath(t), rowsSchema, Options{Create: true}); !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
}

func TestSchemaThatDoesNotFitFailsOpen(t *testing.T) {
	bad := rowsSchema
	bad.Text = "CREATE TABLE meta (id INTEGER PRIMARY KEY) STRICT"
	bad.Init = nil
	if _, err := Open(t.Context(), newPath(t), bad, Options{Create: true}); err == nil {
		t.Error("no error")
	}
	bad.Text = "CREATE TABLE meta (id INTEGER PRIMARY KEY) STRICT; CREATE TALBE"
	path := newPath(t)
	if _, err := Open(t.Context(), path, bad, Options{Create: true}); err == nil {
		t.Error("no error")
	}
	if s := open(t, path, Options{Create: true}); commitSeq(t, s) != 1 {
		t.Error("what a failed attempt left is in the way")
	}
}

func TestSQLiteHasNoWALResetBug(t *testing.T) {
	if sqliteVersion() < minVersion {
		t.Errorf("SQLite %d", sqliteVersion())
	}
	db := openPool("file::memory:", 1)
	defer db.Close()
	var linked string
	if err := db.QueryRowContext(t.Context(), "SELECT sqlite_version()").Scan(&linked); err != nil {
		t.Fatal(err)
	}
	var major, minor, patch int
	if _, err := fmt.Sscanf(linked, "%d.%d.%d", &major, &minor, &patch); err != nil {
		t.Fatal(err)
	}
	if n := major*1_000_000 + minor*1_000 + patch; n != sqliteVersion() {
		t.Errorf("SQLite is %d, its constant says %d", n, sqliteVersion())
	}
}

// The driver is translated for exactly one libc; minimal version selection would take a later one without a word.
func TestLibcIsTheDriversOwn(t *testing.T) {
	module := func(args ...string) (m struct {
		Version, GoMod string
		Replace        *struct{ Path string }
	}) {
		t.Helper()
		out, err := exec.CommandContext(t.Context(), "go", append([]string{"list", "-m", "-json"}, args...)...).Output()
		if err != nil {
			t.Fatal(err)
		}
		if err := json.Unmarshal(out, &m); err != nil {
			t.Fatal(err)
		}
		if m.Replace != nil {
			t.Errorf("%s is replaced by %s", args, m.Replace.Path)
		}
		return m
	}
	gomod, err := os.ReadFile(module("modernc.org/sqlite").GoMod)
	if err != nil {
		t.Fatal(err)
	}
	if libc := module("modernc.org/libc").Version; !strings.Contains(string(gomod), "modernc.org/libc "+libc+"\n") {
		t.Errorf("modernc.org/libc %s is not the version in modernc.org/sqlite's go.mod", libc)
	}
}

func TestCheckNoticesThatTheFileIsGone(t *testing.T) {
	path := newPath(t)
	s := open(t, path, Options{Create: true})
	if err := s.Check(); err != nil {
		t.Fatal(err)
	}
	if err := os.Rename(path, path+".away"); err != nil {
		t.Fatal(err)
	}
	if err := s.Check(); !errors.Is(err, ErrGone) {
		t.Errorf("removed: %v", err)
	}
	if err := os.WriteFile(path, []byte("another"), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := s.Check(); !errors.Is(err, ErrGone) {
		t.Errorf("replaced: %v", err)
	}
	if err := os.Rename(path+".away", path); err != nil {
		t.Fatal(err)
	}
	if err := s.Check(); err != nil {
		t.Errorf("put back: %v", err)
	}
}

func TestDamagedFileCannotBeUsed(t *testing.T) {
	path := newPath(t)
	s := open(t, path, Options{Create: true})
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	for i := 100; i < len(b); i++ { // all but the header
		b[i] = 0xa5
	}
	if err := os.WriteFile(path, b, 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := Open(t.Context(), path, rowsSchema, Options{}); !errors.Is(err, ErrForeign) {
		t.Errorf("open: %v", err)
	}
}
