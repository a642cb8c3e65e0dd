package sqlite

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"go.uber.org/goleak"
)

// TestMain also lets the test binary be the other processes, which print one line for each thing that happened.
func TestMain(m *testing.M) {
	setUp() // before tests that use the driver by themselves
	program := os.Getenv("POSTRIDER_TEST_PROGRAM")
	if program == "" {
		goleak.VerifyTestMain(m)
		return
	}
	run, arg := map[string]func(path string) error{
		"write": writeRows, "group": writeGroups, "open": openOnly, "create": createNode, "die": createUntil,
		"upgrade": upgradeUntil, "hold": holdWriteLock, "lock": holdLock, "pass": passBy,
	}[program], os.Getenv("POSTRIDER_TEST_PATH")
	if err := run(arg); err != nil {
		fmt.Println("error", err)
		os.Exit(1)
	}
}

// command is one of those programs, to be run with path.
func command(t *testing.T, program, path string) *exec.Cmd {
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
	t.Cleanup(cancel)
	cmd := exec.CommandContext(ctx, os.Args[0])
	cmd.Env = append(os.Environ(), "POSTRIDER_TEST_PROGRAM="+program, "POSTRIDER_TEST_PATH="+path)
	cmd.Stderr = os.Stderr
	return cmd
}

// started runs a program until the test ends or it is stopped, and gives its lines and its way to be told to go on.
func started(t *testing.T, program, path string) (lines *bufio.Scanner, cmd *exec.Cmd, goOn func()) {
	t.Helper()
	cmd = command(t, program, path)
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
	})
	return bufio.NewScanner(out), cmd, func() { _ = in.Close() }
}

func wantLine(t *testing.T, lines *bufio.Scanner, prefix string) string {
	t.Helper()
	if !lines.Scan() || !strings.HasPrefix(lines.Text(), prefix) {
		t.Fatalf("got line %q, want %q", lines.Text(), prefix)
	}
	return lines.Text()
}

func untilStdinEnds() {
	for s := bufio.NewScanner(os.Stdin); s.Scan(); {
	}
}

// answered prints what Write said about row n. POSTRIDER_TEST_KILL_AT names where
// the program ends itself, as a crash would.
func answered(n int64, err error) {
	switch {
	case err == nil:
		fmt.Println("in", n)
	case errors.Is(err, ErrUnknown):
		fmt.Println("unknown", n)
	default:
		fmt.Println("not", n, err)
		killAt("not")
	}
}

func killAt(point string) {
	if point == os.Getenv("POSTRIDER_TEST_KILL_AT") {
		_ = syscall.Kill(os.Getpid(), syscall.SIGKILL)
	}
}

// writeRows writes a hundred rows one after the other, under ids of its own.
func writeRows(path string) error {
	ctx := context.Background()
	connects := 0
	s, err := Open(ctx, path, rowsSchema, Options{BusyTimeout: 20 * time.Second, fault: func(point string) error {
		if point == "connect" {
			if connects++; connects == 2 {
				killAt("reconnect")
			}
		}
		return nil
	}})
	if err != nil {
		return err
	}
	fmt.Println("open")
	for i := range int64(100) {
		n := 1000*int64(os.Getpid()) + i
		answered(n, s.Write(ctx, insert(n)))
	}
	return s.Close()
}

// writeGroups writes 40 rows from each of 8 goroutines, now and then one that does not fit SQLite's cache.
func writeGroups(path string) error {
	ctx := context.Background()
	s, err := Open(ctx, path, rowsSchema, Options{})
	if err != nil {
		return err
	}
	fmt.Println("open")
	var wg sync.WaitGroup
	for g := range int64(8) {
		wg.Go(func() {
			for i := range int64(40) {
				n := 1000*(g+1) + i
				size := 10
				if n%97 == 0 {
					size = 4 << 20
				}
				answered(n, s.Write(ctx, blob(n, size)))
			}
		})
	}
	wg.Wait()
	killAt("end")
	return s.Close()
}

func openOnly(path string) error {
	ctx := context.Background()
	s, err := Open(ctx, path, rowsSchema, Options{})
	if err != nil {
		return err
	}
	var n int64
	if err := s.Reader().QueryRowContext(ctx, "SELECT count(*) FROM row").Scan(&n); err != nil {
		return err
	}
	fmt.Println("open", n)
	return s.Close()
}

func createNode(path string) error {
	fmt.Println("ready")
	untilStdinEnds()
	ctx := context.Background()
	text, err := schemaText()
	if err != nil {
		return err
	}
	s, err := Open(ctx, path, NodeSchema(text, "n1", path), Options{Create: true})
	if err != nil {
		return err
	}
	n, err := ReadNode(ctx, s)
	fmt.Println("node", n.Name, n.Epoch, n.ClientID)
	return errors.Join(err, s.Close())
}

// createUntil dies while it creates the file.
func createUntil(path string) error {
	_, err := Open(context.Background(), path, rowsSchema, Options{Create: true, fault: func(point string) error {
		killAt(point)
		return nil
	}})
	return err
}

func holdWriteLock(path string) error {
	ctx := context.Background()
	s, err := Open(ctx, path, rowsSchema, Options{})
	if err != nil {
		return err
	}
	err = s.Write(ctx, func(context.Context, *Tx) error {
		fmt.Println("holding")
		untilStdinEnds()
		return nil
	})
	return errors.Join(err, s.Close())
}

// holdLock takes the lock in the words of its pid and keeps it.
func holdLock(path string) error {
	l, err := TakeLock(path, fmt.Sprintf("pid %d", os.Getpid()))
	if err != nil {
		return err
	}
	fmt.Println("held")
	untilStdinEnds()
	return l.Release()
}

// passBy is an outside program that asks, as SQLite does when it closes, whether nobody else has the file open: it would
// delete the WAL then.
func passBy(path string) error {
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	const sharedFirst, sharedSize = 0x40000002, 510
	l := syscall.Flock_t{Type: syscall.F_WRLCK, Start: sharedFirst, Len: sharedSize}
	if err := syscall.FcntlFlock(f.Fd(), syscall.F_GETLK, &l); err != nil {
		return err
	}
	if l.Type == syscall.F_UNLCK {
		return errors.New("nobody has it open")
	}
	return f.Close()
}

// rowsSchema is the smallest schema that the writer accepts.
var rowsSchema = Schema{Name: "rows", AppID: 0x726f7773, Version: 3, Text: `
CREATE TABLE meta (id INTEGER PRIMARY KEY CHECK (id = 1), boot TEXT NOT NULL, clock_us INTEGER NOT NULL, up_us INTEGER NOT NULL, wall_us INTEGER NOT NULL,
	steady_us INTEGER NOT NULL, skip_us INTEGER NOT NULL DEFAULT 0, commit_seq INTEGER NOT NULL) STRICT;
CREATE TABLE writer (id TEXT PRIMARY KEY, commit_seq INTEGER NOT NULL, at_us INTEGER NOT NULL) STRICT, WITHOUT ROWID;
CREATE TABLE row (id INTEGER PRIMARY KEY, writer INTEGER, data ANY, at_us INTEGER) STRICT;
CREATE TABLE child (id INTEGER PRIMARY KEY, row INTEGER REFERENCES row (id) DEFERRABLE INITIALLY DEFERRED) STRICT;
`, Init: func(ctx context.Context, tx *Tx) error {
	_, _, err := tx.Exec(ctx, "INSERT INTO meta (id, boot, clock_us, up_us, wall_us, steady_us, commit_seq) VALUES (1, '', ?1, 0, ?1, ?1, 0)", tx.NowUS)
	return err
}}

// schemaText is the root schema.sql, which only package main can embed.
func schemaText() (string, error) {
	b, err := os.ReadFile(filepath.Join("..", "..", "schema.sql"))
	return string(b), err
}

func newPath(t testing.TB) string { return filepath.Join(t.TempDir(), "test.db") }

func open(t testing.TB, path string, o Options) *Store {
	t.Helper()
	s, err := Open(t.Context(), path, rowsSchema, o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := s.Close(); err != nil {
			t.Error(err)
		}
	})
	return s
}

func newStore(t testing.TB, o Options) *Store {
	t.Helper()
	o.Create = true
	return open(t, newPath(t), o)
}

func insert(id int64) Unit {
	return func(ctx context.Context, tx *Tx) error {
		_, _, err := tx.Exec(ctx, "INSERT INTO row (id, at_us) VALUES (?, ?)", id, tx.NowUS)
		return err
	}
}

func has(t testing.TB, s *Store, id int64) bool {
	t.Helper()
	return number(t, s, "SELECT count(*) FROM row WHERE id = ?", id) == 1
}

func commitSeq(t testing.TB, s *Store) int64 {
	t.Helper()
	return number(t, s, "SELECT commit_seq FROM meta")
}

func number(t testing.TB, s *Store, query string, args ...any) (n int64) {
	t.Helper()
	if err := s.Reader().QueryRowContext(context.Background(), query, args...).Scan(&n); err != nil {
		t.Fatal(err)
	}
	return n
}

// eventually waits for what no channel tells.
func eventually(t testing.TB, what string, cond func() bool) {
	t.Helper()
	for deadline := time.Now().Add(20 * time.Second); !cond(); {
		if time.Now().After(deadline) {
			t.Fatalf("never happened: %s", what)
		}
		_ = wait(nil, time.Millisecond)
	}
}

// group has the units run in one transaction, in this order, and returns their answers.
func group(t testing.TB, s *Store, units ...Unit) []error {
	t.Helper()
	before := commitSeq(t, s)
	inHand, release := make(chan struct{}), make(chan struct{})
	var wg sync.WaitGroup
	wg.Go(func() {
		if err := s.Write(context.Background(), func(context.Context, *Tx) error {
			close(inHand)
			<-release
			return nil
		}); err != nil {
			t.Error(err)
		}
	})
	<-inHand
	errs := make([]error, len(units))
	for i, u := range units {
		wg.Go(func() { errs[i] = s.Write(context.Background(), u) })
		eventually(t, "the unit is queued", func() bool { return len(s.writer.queue) == i+1 })
	}
	close(release)
	wg.Wait()
	t.Logf("%d units in %d commits", len(units), commitSeq(t, s)-before-1)
	return errs
}

// barrier commits nothing but what every transaction sets.
func barrier(t *testing.T, s *Store) error {
	t.Helper()
	return s.Write(t.Context(), func(context.Context, *Tx) error { return nil })
}
