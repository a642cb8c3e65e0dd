package sqlite

import (
	"bytes"
	"context"
	"database/sql"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"testing"
	"time"
)

func schemaFile(elem ...string) string {
	b, err := os.ReadFile(filepath.Join(append([]string{"..", ".."}, elem...)...))
	if err != nil {
		panic(err)
	}
	return string(b)
}

// kinds are the schemas whose old versions are kept in testdata.
func kinds(path string) map[string]Schema {
	return map[string]Schema{
		"node": NodeSchema(schemaFile("schema.sql"), "n1", path),
		"fold": {Name: "fold", AppID: 0x50534644, Version: 2, Text: schemaFile("fold", "schema.sql"), Upgrades: map[int]Fill{1: FillClocks}, Locks: []string{".fold"}},
	}
}

// oldFile makes a file of an old version, empty but for meta or with rows in all its tables.
func oldFile(t *testing.T, path, kind string, version int, rows bool) {
	t.Helper()
	name := fmt.Sprintf("%s-%d", kind, version)
	text := schemaFile("testdata", "schema", name+"-rows.sql")
	if !rows {
		text = regexp.MustCompile(`(?m)^INSERT INTO meta .*$`).FindString(text)
	}
	foreign("PRAGMA auto_vacuum = INCREMENTAL", "PRAGMA journal_mode = WAL", schemaFile("testdata", "schema", name+".sql"), text,
		fmt.Sprintf("PRAGMA application_id = %d; PRAGMA user_version = %d", kinds(path)[kind].AppID, version))(t, path)
}

// inside is the text of a file's schema and the rows of its tables, by table and column, as an outside program sees them.
func inside(t *testing.T, path string) (text string, rows map[string]string) {
	t.Helper()
	db, err := sql.Open("sqlite", dsn(path, "ro", ""))
	if err != nil {
		t.Fatal(err)
	}
	defer db.Close()
	list := func(query string) (list []string) {
		rows, err := db.QueryContext(t.Context(), query)
		if err != nil {
			t.Fatalf("%s: %v", query, err)
		}
		defer rows.Close()
		for rows.Next() {
			var s string
			if err := rows.Scan(&s); err != nil {
				t.Fatal(err)
			}
			list = append(list, s)
		}
		if err := rows.Err(); err != nil {
			t.Fatal(err)
		}
		return list
	}
	if bad := list("SELECT integrity_check FROM pragma_integrity_check UNION ALL SELECT 'foreign key of ' || \"table\" FROM pragma_foreign_key_check"); len(bad) != 1 || bad[0] != "ok" {
		t.Errorf("integrity: %q", bad)
	}
	rows = map[string]string{}
	for _, table := range list("SELECT name FROM sqlite_master WHERE type = 'table'") {
		for _, column := range list("SELECT name FROM pragma_table_info('" + table + "')") {
			rows[table+"."+column] = strings.Join(list("SELECT quote("+column+") FROM "+table+" ORDER BY 1"), "\n")
		}
	}
	return strings.Join(list("SELECT type || ' ' || name || ' ' || tbl_name || ' ' || coalesce(sql, '') FROM sqlite_master ORDER BY type, name"), "\n"), rows
}

func version(t *testing.T, path string) int {
	t.Helper()
	_, n, _, err := look(t.Context(), path, "")
	if err != nil {
		t.Fatal(err)
	}
	return n
}

// An upgraded file has the schema of a new one, byte for byte, and all its rows.
func TestUpgradeGivesTheTextOfANewFile(t *testing.T) {
	for kind, schema := range kinds("") {
		for old := range schema.Version - 1 {
			for _, filled := range []bool{false, true} {
				t.Run(fmt.Sprintf("%s %d, rows %v", kind, old+1, filled), func(t *testing.T) {
					path := newPath(t)
					oldFile(t, path, kind, old+1, filled)
					_, before := inside(t, path)
					var said bytes.Buffer
					o := Options{Logger: slog.New(slog.NewTextHandler(&said, nil))}
					for range 2 {
						s, err := Open(t.Context(), path, kinds(path)[kind], o)
						if err != nil {
							t.Fatal(err)
						}
						if err := s.Close(); err != nil {
							t.Fatal(err)
						}
					}
					if n := strings.Count(said.String(), "level=INFO msg=\"database upgraded\""); n != 1 || !strings.Contains(said.String(), "from=1 to=2") {
						t.Errorf("said %d times: %s", n, said.String())
					}
					fresh := filepath.Join(t.TempDir(), "new.db")
					foreign(schema.Text)(t, fresh)
					want, _ := inside(t, fresh)
					got, after := inside(t, path)
					if got != want {
						t.Errorf("the schema became\n%s\nwant\n%s", got, want)
					}
					if v := version(t, path); v != schema.Version {
						t.Errorf("version %d", v)
					}
					for column, values := range before {
						if strings.HasPrefix(column, "meta.") || strings.HasPrefix(column, "writer.") { // opening sets them
							continue
						}
						if has, ok := after[column]; !ok || has != values {
							t.Errorf("%s was\n%s\nand is\n%s", column, values, has)
						}
					}
					for _, column := range []string{"meta.client_id", "meta.node", "meta.epoch", "meta.name", "meta.rewinds", "meta.duplicates"} {
						if before[column] != after[column] {
							t.Errorf("%s was %s, is %s", column, before[column], after[column])
						}
					}
				})
			}
		}
	}
}

// Steady time begins with recorded time, also in a boot that recorded a time ahead of the clock; and what the clock says
// of the time since the last transaction has passed.
func TestUpgradeBeginsSteadyTime(t *testing.T) {
	const last, boot = 1796058084173101, "25f12657-4222-46a0-87a5-e3619ce5e96b" // of the old file
	for _, c := range []struct {
		what                     string
		boot                     string
		wall                     int64
		wantRecorded, wantSteady int64
	}{
		{"an hour later", boot, last + hour, last + hour, last + hour},
		{"the clock was set back", boot, last - hour, last, last},
		{"another boot", "other", last + hour, last + hour, last + hour},
		{"another boot, set back", "other", last - hour, last - hour, last},
		{"another boot in 1970", "other", hour, hour, last},
	} {
		for kind := range kinds("") {
			path, m := newPath(t), newMachine()
			oldFile(t, path, kind, 1, true)
			m.boot = c.boot
			m.wall.Store(c.wall)
			s, err := Open(t.Context(), path, kinds(path)[kind], Options{Clocks: m.clocks()})
			if err != nil {
				t.Fatal(err)
			}
			got := times(t, s)
			if got.recorded != c.wantRecorded || got.steady != c.wantSteady || got.skip != 0 {
				t.Errorf("%s, %s: recorded %+d, steady %+d from what it should be, skipped %d", kind, c.what, got.recorded-c.wantRecorded, got.steady-c.wantSteady, got.skip)
			}
			m.pass(second)
			if s.SteadyUS() != c.wantSteady+second {
				t.Errorf("%s, %s: it does not go on", kind, c.what)
			}
			if err := s.Close(); err != nil {
				t.Error(err)
			}
		}
	}
}

func upgradeSteps(t *testing.T, kind string) (n int) {
	t.Helper()
	path := newPath(t)
	oldFile(t, path, kind, 1, true)
	s, err := Open(t.Context(), path, kinds(path)[kind], Options{fault: func(point string) error {
		if point == "upgrade" {
			n++
		}
		return nil
	}})
	if err != nil {
		t.Fatal(err)
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	return n
}

// An upgrade that does not come to its end has not begun.
func TestUpgradeFailsWithoutAChange(t *testing.T) {
	for kind := range kinds("") {
		path := newPath(t)
		oldFile(t, path, kind, 1, true)
		wantText, wantRows := inside(t, path)
		steps := upgradeSteps(t, kind)
		if steps < 5 {
			t.Fatalf("%s: %d statements", kind, steps)
		}
		for at := range steps {
			n, broken := 0, errors.New("broken")
			_, err := Open(t.Context(), path, kinds(path)[kind], Options{fault: func(point string) error {
				if point != "upgrade" {
					return nil
				}
				if n++; n == at+1 {
					return broken
				}
				return nil
			}})
			if !errors.Is(err, broken) {
				t.Fatalf("%s, statement %d: %v", kind, at, err)
			}
			if text, rows := inside(t, path); text != wantText || !maps.Equal(rows, wantRows) || version(t, path) != 1 {
				t.Errorf("%s: something changed before statement %d", kind, at)
			}
		}
	}
}

// upgradeUntil dies before a statement of the upgrade: POSTRIDER_TEST_KILL_AT counts them from 0.
func upgradeUntil(path string) error {
	n := 0
	_, err := Open(context.Background(), path, kinds(path)[os.Getenv("POSTRIDER_TEST_KIND")], Options{fault: func(point string) error {
		if point == "upgrade" {
			killAt(fmt.Sprint(n))
			n++
		}
		return nil
	}})
	return err
}

func TestUpgradeSurvivesKill(t *testing.T) {
	for kind := range kinds("") {
		steps := upgradeSteps(t, kind)
		path := newPath(t)
		oldFile(t, path, kind, 1, true)
		_, before := inside(t, path)
		for at := range steps {
			if at%3 != 0 && at != steps-1 { // TestUpgradeFailsWithoutAChange goes to all of them
				continue
			}
			cmd := command(t, "upgrade", path)
			cmd.Env = append(cmd.Env, fmt.Sprintf("POSTRIDER_TEST_KILL_AT=%d", at), "POSTRIDER_TEST_KIND="+kind)
			err := cmd.Run()
			if status, ok := cmd.ProcessState.Sys().(syscall.WaitStatus); !ok || status.Signal() != syscall.SIGKILL {
				t.Fatalf("%s, statement %d: %v", kind, at, err)
			}
			if _, rows := inside(t, path); !maps.Equal(rows, before) || version(t, path) != 1 {
				t.Errorf("%s: something changed before statement %d", kind, at)
			}
		}
		s, err := Open(t.Context(), path, kinds(path)[kind], Options{})
		if err != nil {
			t.Fatalf("%s, after all kills: %v", kind, err)
		}
		if err := s.Close(); err != nil {
			t.Fatal(err)
		}
		_, after := inside(t, path)
		for _, column := range []string{"inbox.data", "outbox.data", "checkpoint.state", "seen.hash", "record.data", "hole.hi", "sqlite_sequence.seq"} {
			if before[column] != after[column] {
				t.Errorf("%s, after all kills: %s was\n%s\nand is\n%s", kind, column, before[column], after[column])
			}
		}
	}
}

func TestProcessesUpgradeAtOnce(t *testing.T) {
	path := newPath(t)
	oldFile(t, path, "node", 1, true)
	_, before := inside(t, path)
	var reads []func() string
	var goes []func()
	for range 4 {
		lines, cmd, goOn := started(t, "create", path)
		wantLine(t, lines, "ready")
		goes = append(goes, goOn)
		reads = append(reads, func() string {
			line := wantLine(t, lines, "node ")
			if err := cmd.Wait(); err != nil {
				t.Error(err)
			}
			return line
		})
	}
	for _, goOn := range goes {
		goOn()
	}
	for _, read := range reads {
		if got := read(); got != "node n1 1796058085 postrider-n1-PI2DGVHAEZ" {
			t.Errorf("a process says %q", got)
		}
	}
	_, after := inside(t, path)
	if before["inbox.data"] != after["inbox.data"] || version(t, path) != nodeVersion {
		t.Error("the rows are others")
	}
}

// A reader changes nothing, not even the version.
func TestReaderRefusesAnOlderFileUntouched(t *testing.T) {
	path := newPath(t)
	oldFile(t, path, "node", 1, true)
	before, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := openNode(t, path, Options{ReadOnly: true}); !errors.Is(err, ErrOlder) || !strings.Contains(err.Error(), path) {
		t.Errorf("open: %v", err)
	}
	if _, err := Open(t.Context(), path, NodeSchema("", "n1", path), Options{}); !errors.Is(err, ErrForeign) {
		t.Errorf("without the text of the schema: %v", err)
	}
	if after, err := os.ReadFile(path); err != nil || !bytes.Equal(before, after) {
		t.Errorf("touched: %v", err)
	}
	if fi, err := os.Stat(path + "-wal"); err == nil && fi.Size() != 0 {
		t.Errorf("%d bytes were written beside it", fi.Size())
	}
	for _, o := range []Options{{}, {ReadOnly: true}} {
		s, err := openNode(t, path, o)
		if err != nil {
			t.Fatal(err)
		}
		if err := s.Close(); err != nil {
			t.Error(err)
		}
	}
}

// What the text does not know and has rows stays; indexes and views are the text's.
func TestUpgradeKeepsForeignTables(t *testing.T) {
	path := newPath(t)
	oldFile(t, path, "node", 1, true)
	foreign("CREATE TABLE notes (x)", "INSERT INTO notes VALUES (7)", "CREATE INDEX mine ON inbox (type)", "CREATE VIEW sight AS SELECT type FROM inbox")(t, path)
	s, err := openNode(t, path, Options{})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	if n := number(t, s, "SELECT x FROM notes"); n != 7 {
		t.Errorf("a note says %d", n)
	}
	if n := number(t, s, "SELECT count(*) FROM sqlite_master WHERE name IN ('mine', 'sight') OR name LIKE 'old%'"); n != 0 {
		t.Errorf("%d objects are left", n)
	}
}

// An upgrade waits for a transaction of another process, and says so when that takes too long.
func TestUpgradeWaitsForItsTurn(t *testing.T) {
	path := newPath(t)
	oldFile(t, path, "node", 1, true)
	db, err := sql.Open("sqlite", dsn(path, "rw", ""))
	if err != nil {
		t.Fatal(err)
	}
	defer db.Close()
	conn, err := db.Conn(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	if _, err := conn.ExecContext(t.Context(), "BEGIN IMMEDIATE"); err != nil {
		t.Fatal(err)
	}
	if _, err := openNode(t, path, Options{BusyTimeout: 20 * time.Millisecond}); !errors.Is(err, ErrBusy) {
		t.Errorf("open beside a transaction: %v", err)
	}
	if _, err := conn.ExecContext(t.Context(), "ROLLBACK"); err != nil {
		t.Fatal(err)
	}
	s, err := openNode(t, path, Options{BusyTimeout: 20 * time.Millisecond})
	if err != nil {
		t.Fatal(err)
	}
	if err := s.Close(); err != nil {
		t.Error(err)
	}
}

// A process of an older version that runs on the file would go on writing as if nothing had changed: it has to end first.
func TestUpgradeIsRefusedWhileAnOlderProcessRuns(t *testing.T) {
	for kind, endings := range map[string][]string{"node": {".node", ".relay"}, "fold": {".fold"}} {
		for _, ending := range endings {
			path := newPath(t)
			oldFile(t, path, kind, 1, true)
			before, err := os.ReadFile(path)
			if err != nil {
				t.Fatal(err)
			}
			running, err := TakeLock(path+ending, "17@host")
			if err != nil {
				t.Fatal(err)
			}
			_, err = Open(t.Context(), path, kinds(path)[kind], Options{})
			if !errors.Is(err, ErrLocked) || !strings.Contains(err.Error(), "older version") || !strings.Contains(err.Error(), ending+": locked by 17@host") {
				t.Errorf("open while %s is held: %v", ending, err)
			}
			if after, err := os.ReadFile(path); err != nil || !bytes.Equal(before, after) || version(t, path) != 1 {
				t.Errorf("touched while %s is held: %v", ending, err)
			}
			for _, other := range endings {
				if other == ending {
					continue
				}
				l, err := TakeLock(path+other, "me")
				if err != nil {
					t.Fatalf("%s is still held: %v", other, err)
				}
				if err := l.Release(); err != nil {
					t.Error(err)
				}
			}
			if err := running.Release(); err != nil {
				t.Fatal(err)
			}
			s, err := Open(t.Context(), path, kinds(path)[kind], Options{})
			if err != nil {
				t.Fatal(err)
			}
			if running, err = TakeLock(path+ending, "me"); err != nil {
				t.Fatalf("after the upgrade: %v", err)
			}
			second, err := Open(t.Context(), path, kinds(path)[kind], Options{}) // nothing is to be upgraded: locks mean nothing
			if err != nil {
				t.Fatal(err)
			}
			if err := errors.Join(second.Close(), s.Close(), running.Release()); err != nil {
				t.Error(err)
			}
		}
	}
}

// Nor does one begin while the file is being made anew. When the upgrade is in, the locks are free.
func TestUpgradeKeepsProcessesOut(t *testing.T) {
	path := newPath(t)
	oldFile(t, path, "node", 1, true)
	tried, statements := 0, upgradeSteps(t, "node")
	n := 0
	s, err := Open(t.Context(), path, kinds(path)["node"], Options{fault: func(point string) error {
		if point != "upgrade" {
			return nil
		}
		if n++; n <= 2 { // before it has the write lock
			return nil
		}
		for _, ending := range []string{".node", ".relay"} {
			l, err := TakeLock(path+ending, "me")
			if free := n == statements; free != (err == nil) || err != nil && !errors.Is(err, ErrLocked) {
				t.Errorf("statement %d of %d: lock %s: %v", n, statements, ending, err)
			}
			if err == nil {
				if err := l.Release(); err != nil {
					t.Error(err)
				}
			}
			tried++
		}
		return nil
	}})
	if err != nil {
		t.Fatal(err)
	}
	if err := s.Close(); err != nil {
		t.Error(err)
	}
	if tried < 10 {
		t.Errorf("tried %d times", tried)
	}
}

// Another process may be quicker, also one of a later version: what it made of the file is left alone.
func TestUpgradeFindsThatAnotherProcessWasQuicker(t *testing.T) {
	for _, newer := range []bool{false, true} {
		path := newPath(t)
		oldFile(t, path, "node", 1, true)
		var said bytes.Buffer
		quick := true
		s, err := Open(t.Context(), path, kinds(path)["node"], Options{Logger: slog.New(slog.NewTextHandler(&said, nil)), fault: func(point string) error {
			if point != "upgrade" || !quick {
				return nil
			}
			quick = false
			other, err := openNode(t, path, Options{})
			if err := errors.Join(err, other.Close()); err != nil {
				return err
			}
			if newer {
				foreign(fmt.Sprintf("PRAGMA user_version = %d", nodeVersion+1))(t, path)
			}
			lock, err := TakeLock(path+".node", "one of the new version") // which may run beside this one
			if err == nil {
				t.Cleanup(func() { _ = lock.Release() })
			}
			return err
		}})
		switch {
		case newer && !errors.Is(err, ErrNewer):
			t.Errorf("a newer file: %v", err)
		case newer:
			if v := version(t, path); v != nodeVersion+1 {
				t.Errorf("a newer file has version %d now", v)
			}
		case err != nil:
			t.Error(err)
		default:
			if err := s.Close(); err != nil {
				t.Error(err)
			}
		}
		if strings.Contains(said.String(), "upgraded") {
			t.Errorf("newer %v: said %s", newer, said.String())
		}
	}
}
