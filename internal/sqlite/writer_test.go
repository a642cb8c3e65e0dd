package sqlite

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"math"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	lib "modernc.org/sqlite/lib"
)

var errOwn = errors.New("the unit's own")

// next inserts a row with the next id.
func next(ctx context.Context, tx *Tx) error {
	_, _, err := tx.Exec(ctx, "INSERT INTO row (data) VALUES ('x')")
	return err
}

func blob(id int64, size int) Unit {
	return func(ctx context.Context, tx *Tx) error {
		_, _, err := tx.Exec(ctx, "INSERT INTO row (id, data) VALUES (?, zeroblob(?))", id, size)
		return err
	}
}

func wantAnswers(t *testing.T, got []error, want ...func(error) bool) {
	t.Helper()
	for i, ok := range want {
		if !ok(got[i]) {
			t.Errorf("unit %d was answered %v", i, got[i])
		}
	}
}

func isNil(err error) bool { return err == nil }
func isFull(err error) bool {
	return code(err)&0xff == lib.SQLITE_FULL
}
func is(target error) func(error) bool {
	return func(err error) bool { return errors.Is(err, target) }
}

// limit lets the file grow by so many pages from now on.
func limit(t *testing.T, s *Store, pages int64) {
	t.Helper()
	err := s.Write(t.Context(), func(ctx context.Context, tx *Tx) error {
		var n int64
		if err := tx.Get(ctx, "PRAGMA page_count", nil, &n); err != nil {
			return err
		}
		return tx.Get(ctx, fmt.Sprintf("PRAGMA max_page_count = %d", n+pages), nil, &n)
	})
	if err != nil {
		t.Fatal(err)
	}
}

func TestFailingUnitNeverFailsItsNeighbours(t *testing.T) {
	s := newStore(t, Options{})
	before := commitSeq(t, s)
	errs := group(t, s,
		insert(1),
		insert(1), // constraint
		func(ctx context.Context, tx *Tx) error { return errors.Join(insert(2)(ctx, tx), errOwn) },
		func(ctx context.Context, tx *Tx) error { _ = insert(3)(ctx, tx); panic("a bug") },
		func(ctx context.Context, tx *Tx) error {
			_, _, err := tx.Exec(ctx, "INSERT INTO nowhere VALUES (1)")
			return err
		},
		insert(4),
	)
	wantAnswers(t, errs, isNil, IsConstraint, is(errOwn),
		func(err error) bool { return err != nil && strings.Contains(err.Error(), "panic in a write: a bug") },
		func(err error) bool { return err != nil }, isNil)
	for id, want := range map[int64]bool{1: true, 2: false, 3: false, 4: true} {
		if has(t, s, id) != want {
			t.Errorf("row %d is there: %v", id, !want)
		}
	}
	if n := commitSeq(t, s) - before; n != 2 { // one holds the group together
		t.Errorf("%d commits, want 2", n)
	}
	// Alone, a unit has no savepoint.
	wantAnswers(t, []error{
		s.Write(t.Context(), insert(1)),
		s.Write(t.Context(), func(ctx context.Context, tx *Tx) error { _ = insert(5)(ctx, tx); panic("a bug") }),
		s.Write(t.Context(), insert(6)),
	}, IsConstraint, func(err error) bool { return err != nil }, isNil)
	if has(t, s, 5) || !has(t, s, 6) {
		t.Error("a lone unit was not all or nothing")
	}
}

func TestWritesShareACommit(t *testing.T) {
	s := newStore(t, Options{MaxGroup: 64})
	before := commitSeq(t, s)
	var units []Unit
	for i := range int64(100) {
		units = append(units, insert(i+1))
	}
	for _, err := range group(t, s, units...) {
		if err != nil {
			t.Error(err)
		}
	}
	if n := commitSeq(t, s) - before; n != 3 { // the holder, 64, 36
		t.Errorf("%d commits for 100 units, want 3", n)
	}
}

func TestAnswersComeAfterTheCommit(t *testing.T) {
	var ran []int64
	var committed sync.Map
	s := newStore(t, Options{fault: func(point string) error {
		if point == "committed" { // COMMIT has returned
			for _, id := range ran {
				committed.Store(id, true)
			}
			ran = nil
		}
		return nil
	}})
	var wg sync.WaitGroup
	for g := range int64(20) {
		wg.Go(func() {
			for i := range int64(10) {
				id := 100*(g+1) + i
				err := s.Write(t.Context(), func(ctx context.Context, tx *Tx) error {
					ran = append(ran, id)
					return insert(id)(ctx, tx)
				})
				if _, ok := committed.Load(id); !ok || err != nil {
					t.Errorf("row %d was answered %v before its COMMIT", id, err)
				}
				if !has(t, s, id) {
					t.Errorf("row %d was answered and is not visible", id)
				}
			}
		})
	}
	wg.Wait()
}

func TestCancelledWhileQueuedNeverRuns(t *testing.T) {
	s := newStore(t, Options{})
	inHand, release := make(chan struct{}), make(chan struct{})
	holder := make(chan error, 1)
	go func() {
		holder <- s.Write(context.Background(), func(context.Context, *Tx) error { close(inHand); <-release; return nil })
	}()
	<-inHand
	cause := errors.New("nobody waits any more")
	ctx, cancel := context.WithCancelCause(t.Context())
	queued := make(chan error, 1)
	var ran atomic.Bool
	go func() {
		queued <- s.Write(ctx, func(context.Context, *Tx) error { ran.Store(true); return nil })
	}()
	eventually(t, "the unit is queued", func() bool { return len(s.writer.queue) == 1 })
	cancel(cause)
	if err := <-queued; !errors.Is(err, cause) {
		t.Errorf("answered %v", err)
	}
	close(release)
	if err := <-holder; err != nil {
		t.Error(err)
	}
	if err := barrier(t, s); err != nil {
		t.Error(err)
	}
	if ran.Load() {
		t.Error("the unit ran all the same")
	}
	if err := s.Write(ctx, insert(1)); !errors.Is(err, cause) || has(t, s, 1) {
		t.Errorf("an ended context was answered %v", err)
	}
}

func TestCancelledWhileTakenWaitsForTheTruth(t *testing.T) {
	s := newStore(t, Options{})
	ctx, cancel := context.WithCancel(t.Context())
	inHand, release := make(chan struct{}), make(chan struct{})
	taken := make(chan error, 1)
	go func() {
		taken <- s.Write(ctx, func(inner context.Context, tx *Tx) error {
			close(inHand)
			<-release
			// Not even a unit that uses the wrong context takes the transaction with it.
			return errors.Join(inner.Err(), insert(1)(ctx, tx))
		})
	}()
	<-inHand
	cancel()
	select {
	case err := <-taken:
		t.Fatalf("answered %v while the unit ran", err)
	case <-time.After(20 * time.Millisecond):
	}
	close(release)
	if err := <-taken; err != nil {
		t.Error(err)
	}
	if !has(t, s, 1) {
		t.Error("the row is missing")
	}
}

func TestCloseEndsTheGroupInHandAndAnswersTheRest(t *testing.T) {
	path := newPath(t)
	s, err := Open(t.Context(), path, rowsSchema, Options{Create: true})
	if err != nil {
		t.Fatal(err)
	}
	inHand, release := make(chan struct{}), make(chan struct{})
	holder := make(chan error, 1)
	go func() {
		holder <- s.Write(context.Background(), func(ctx context.Context, tx *Tx) error {
			close(inHand)
			<-release
			return insert(1)(ctx, tx)
		})
	}()
	<-inHand
	queued := make(chan error, 10)
	for i := range int64(10) {
		go func() { queued <- s.Write(context.Background(), insert(i+2)) }()
	}
	eventually(t, "the units are queued", func() bool { return len(s.writer.queue) == 10 })
	closed := make(chan error, 1)
	go func() { closed <- s.Close() }()
	<-s.writer.quit
	close(release)
	if err := <-holder; err != nil {
		t.Errorf("the group in hand was answered %v", err)
	}
	var in int64
	for range 10 {
		if err := <-queued; err == nil {
			in++
		} else if !errors.Is(err, ErrClosed) {
			t.Errorf("a waiting unit was answered %v", err)
		}
	}
	if err := <-closed; err != nil {
		t.Error(err)
	}
	if err := s.Write(t.Context(), insert(100)); !errors.Is(err, ErrClosed) {
		t.Errorf("after Close: %v", err)
	}
	if err := s.Close(); err != nil {
		t.Errorf("second Close: %v", err)
	}
	s = open(t, path, Options{})
	if n := number(t, s, "SELECT count(*) FROM row"); n != 1+in {
		t.Errorf("%d rows, %d were answered as in", n, 1+in)
	}
}

func TestWriteRacingCloseNeitherHangsNorLies(t *testing.T) {
	path := newPath(t)
	newStoreAt := func(create bool) *Store {
		s, err := Open(t.Context(), path, rowsSchema, Options{Create: create, MaxGroup: 4})
		if err != nil {
			t.Fatal(err)
		}
		return s
	}
	var in atomic.Int64
	for i := range 100 {
		s := newStoreAt(i == 0)
		var wg sync.WaitGroup
		for range 6 {
			wg.Go(func() {
				for {
					err := s.Write(t.Context(), next)
					if err != nil {
						if !errors.Is(err, ErrClosed) {
							t.Errorf("answered %v", err)
						}
						return
					}
					in.Add(1)
				}
			})
		}
		for range i % 7 {
			if err := barrier(t, s); err != nil {
				t.Error(err)
			}
		}
		if err := s.Close(); err != nil {
			t.Error(err)
		}
		wg.Wait()
	}
	s := open(t, path, Options{})
	if n := number(t, s, "SELECT count(*) FROM row"); n != in.Load() {
		t.Errorf("%d rows, %d were answered as in", n, in.Load())
	}
}

func TestFullDiskInOneUnitSparesTheOthers(t *testing.T) {
	s := newStore(t, Options{})
	limit(t, s, 3)
	before := commitSeq(t, s)
	errs := group(t, s, insert(1), blob(2, 100_000), insert(3),
		func(ctx context.Context, tx *Tx) error { // goes on after the error, and keeps it to itself
			_ = blob(4, 100_000)(ctx, tx)
			_ = insert(5)(ctx, tx)
			return nil
		}, insert(6))
	wantAnswers(t, errs, isNil, isFull, isNil, isFull, isNil)
	for id, want := range map[int64]bool{1: true, 2: false, 3: true, 4: false, 5: false, 6: true} {
		if has(t, s, id) != want {
			t.Errorf("row %d is there: %v", id, !want)
		}
	}
	if n := commitSeq(t, s) - before; n != 4 { // the holder and each of three by itself
		t.Errorf("%d commits, want 4", n)
	}
	if err := s.Write(t.Context(), insert(7)); err != nil {
		t.Errorf("afterwards: %v", err)
	}
}

// A's rows made B a duplicate and left C no room; then A's transaction went down, and A changed its mind.
func TestUnitsThatMetALostNeighbourRunAgain(t *testing.T) {
	s := newStore(t, Options{})
	limit(t, s, 6)
	runs := 0
	errs := group(t, s,
		func(ctx context.Context, tx *Tx) error {
			if runs++; runs > 1 {
				return errOwn
			}
			return blob(1, 16_000)(ctx, tx)
		},
		insert(1),
		blob(3, 16_000))
	wantAnswers(t, errs, is(errOwn), isNil, isNil)
	if !has(t, s, 1) || !has(t, s, 3) || runs != 2 {
		t.Errorf("rows 1 and 3: %v, %v; %d runs", has(t, s, 1), has(t, s, 3), runs)
	}
}

// Whatever ends the transaction under a unit, the neighbours run again.
func TestTransactionLostInOneUnitSparesTheOthers(t *testing.T) {
	s := newStore(t, Options{})
	lose := func(ctx context.Context, tx *Tx) error {
		_, _, _ = tx.Exec(ctx, "INSERT OR ROLLBACK INTO row (id) VALUES (1)") // which is there; the unit keeps that to itself
		return nil
	}
	errs := group(t, s, insert(1), lose, insert(2),
		func(ctx context.Context, tx *Tx) error { return errors.Join(lose(ctx, tx), errOwn) }, insert(3))
	wantAnswers(t, errs, isNil, func(err error) bool { return err != nil }, isNil, is(errOwn), isNil)
	if n := number(t, s, "SELECT count(*) FROM row"); n != 3 {
		t.Errorf("%d rows, want 3", n)
	}
}

func TestCommitRefusedForOneUnitSparesTheOthers(t *testing.T) {
	s := newStore(t, Options{})
	errs := group(t, s, insert(1), func(ctx context.Context, tx *Tx) error {
		_, _, err := tx.Exec(ctx, "INSERT INTO child (row) VALUES (999)") // checked by COMMIT
		return err
	}, insert(2))
	wantAnswers(t, errs, isNil, IsConstraint, isNil)
	if !has(t, s, 1) || !has(t, s, 2) {
		t.Error("a neighbour's row is missing")
	}
}

func TestRowsLeftOpenEndWithTheirUnit(t *testing.T) {
	s := newStore(t, Options{})
	for i := range int64(10) {
		if err := s.Write(t.Context(), insert(i+1)); err != nil {
			t.Fatal(err)
		}
	}
	leak := func(ctx context.Context, tx *Tx) error {
		rows, err := tx.Query(ctx, "SELECT id FROM row")
		if err == nil && !rows.Next() {
			err = errors.Join(rows.Err(), sql.ErrNoRows)
		}
		if err != nil {
			return err
		}
		panic("in the middle")
	}
	if err := s.Write(t.Context(), leak); err == nil || !strings.Contains(err.Error(), "in the middle") {
		t.Error(err)
	}
	// A snapshot left behind would fail this with BUSY_SNAPSHOT, as soon as another writer came in between.
	other := open(t, s.Path(), Options{})
	if err := other.Write(t.Context(), insert(20)); err != nil {
		t.Error(err)
	}
	if err := s.Write(t.Context(), insert(21)); err != nil {
		t.Error(err)
	}
}

func TestUnitThatQueriesOftenKeepsNoRows(t *testing.T) {
	s := newStore(t, Options{})
	err := s.Write(t.Context(), func(ctx context.Context, tx *Tx) error {
		open, err := tx.Query(ctx, "SELECT 1 UNION SELECT 2") // stays open throughout
		if err != nil {
			return err
		}
		for range 1000 {
			rows, err := tx.Query(ctx, "SELECT id FROM row")
			if err != nil {
				return err
			}
			if err := rows.Close(); err != nil {
				return err
			}
		}
		if len(tx.rows) > 100 {
			t.Errorf("%d rows are kept", len(tx.rows))
		}
		for range 2 {
			if !open.Next() {
				t.Error("the open rows ended")
			}
		}
		return open.Close()
	})
	if err != nil {
		t.Error(err)
	}
}

// faults fails the named points, each so many times, from now on.
type faults struct {
	mu   sync.Mutex
	left map[string]int
	on   map[string]func()
	hits map[string]int
}

func (f *faults) set(point string, times int) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.left[point] = times
}

func (f *faults) at(point string) error {
	f.mu.Lock()
	f.hits[point]++
	fail := f.left[point] > 0
	if fail {
		f.left[point]--
	}
	on := f.on[point]
	f.mu.Unlock()
	if on != nil {
		on()
	}
	if fail {
		return fmt.Errorf("no luck with %s", point)
	}
	return nil
}

func (f *faults) hit(point string) int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.hits[point]
}

func (f *faults) when(point string, do func()) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.on[point] = do
}

func newFaults() *faults {
	return &faults{left: map[string]int{}, on: map[string]func(){}, hits: map[string]int{}}
}

func TestFailedCommitIsResolved(t *testing.T) {
	for _, c := range []struct {
		name string
		set  func(*faults)
		in   bool
	}{
		{"not in", func(f *faults) { f.set("commit", 1) }, false},
		{"in", func(f *faults) { f.set("committed", 1) }, true},
		{"not in, and its successor fails", func(f *faults) { f.set("commit", 3) }, false},
		{"not in, and its successor only seems to fail", func(f *faults) { f.set("commit", 1); f.set("committed", 2) }, false},
		{"in, and its successor fails", func(f *faults) { f.set("committed", 1); f.set("checkpoint", 2); f.set("connect", 2) }, true},
		{"not in, and no connection for a while", func(f *faults) { f.set("commit", 1); f.set("connect", 3) }, false},
	} {
		t.Run(c.name, func(t *testing.T) {
			f := newFaults()
			path := newPath(t)
			s, err := Open(t.Context(), path, rowsSchema, Options{Create: true, fault: f.at})
			if err != nil {
				t.Fatal(err)
			}
			if err := s.Write(t.Context(), insert(1)); err != nil {
				t.Fatal(err)
			}
			c.set(f)
			errs := []error{s.Write(t.Context(), insert(2))}
			if c.in {
				wantAnswers(t, errs, isNil)
			} else {
				wantAnswers(t, errs, func(err error) bool { return err != nil && !errors.Is(err, ErrUnknown) })
			}
			if has(t, s, 2) != c.in {
				t.Errorf("row 2 is there: %v, want %v", !c.in, c.in)
			}
			if err := s.Write(t.Context(), insert(3)); err != nil {
				t.Errorf("afterwards: %v", err)
			}
			if err := s.Close(); err != nil {
				t.Error(err)
			}
			s = open(t, path, Options{})
			if has(t, s, 2) != c.in || !has(t, s, 1) || !has(t, s, 3) {
				t.Errorf("after reopening rows 1 to 3 are there: %v, %v, %v", has(t, s, 1), has(t, s, 2), has(t, s, 3))
			}
		})
	}
}

func TestRefusedUnitOfAFailedCommitKeepsItsAnswer(t *testing.T) {
	f := newFaults()
	s := newStore(t, Options{fault: f.at})
	commits := 0
	f.when("committed", func() {
		if commits++; commits == 1 { // after the holder's, before the group's
			f.set("committed", 1)
		}
	})
	wantAnswers(t, group(t, s, insert(1), func(context.Context, *Tx) error { return errOwn }), isNil, is(errOwn))
	if !has(t, s, 1) {
		t.Error("row 1 is missing")
	}
}

func TestNobodyIsAnsweredWhileACommitIsUnknown(t *testing.T) {
	f := newFaults()
	s := newStore(t, Options{fault: f.at})
	f.set("commit", 1)
	f.set("connect", math.MaxInt)
	answers := make(chan error, 3)
	for i := range int64(3) {
		go func() { answers <- s.Write(context.Background(), insert(i+1)) }()
	}
	was := f.hit("connect")
	eventually(t, "the writer tries again and again", func() bool { return f.hit("connect") > was+4 })
	select {
	case err := <-answers:
		t.Fatalf("answered %v", err)
	default:
	}
	f.set("connect", 0)
	failed := 0
	for range 3 {
		if err := <-answers; err != nil {
			failed++
		}
	}
	if n := number(t, s, "SELECT count(*) FROM row"); n != int64(3-failed) || failed == 0 {
		t.Errorf("%d rows, %d units failed", n, failed)
	}
}

func TestCloseWhileACommitIsUnknownSaysSo(t *testing.T) {
	f := newFaults()
	path := newPath(t)
	s, err := Open(t.Context(), path, rowsSchema, Options{Create: true, fault: f.at})
	if err != nil {
		t.Fatal(err)
	}
	f.set("committed", 1)
	f.set("checkpoint", math.MaxInt)
	answer := make(chan error, 1)
	go func() { answer <- s.Write(context.Background(), insert(1)) }()
	was := f.hit("checkpoint")
	eventually(t, "the writer tries again", func() bool { return f.hit("checkpoint") > was+2 })
	if err := s.Close(); err != nil {
		t.Error(err)
	}
	if err := <-answer; !errors.Is(err, ErrUnknown) {
		t.Errorf("answered %v", err)
	}
	if s = open(t, path, Options{}); !has(t, s, 1) {
		t.Error("the next process does not see what was in")
	}
}

// A COMMIT that is in although it failed may stand on pages that the kernel holds as clean: its answer waits until they
// are in the main file, which a reader of the WAL delays.
func TestUnknownCommitThatIsInWaitsForReaders(t *testing.T) {
	f := newFaults()
	s := newStore(t, Options{fault: f.at})
	if err := s.Write(t.Context(), insert(1)); err != nil {
		t.Fatal(err)
	}
	rows, err := s.Reader().QueryContext(t.Context(), "SELECT id FROM row UNION ALL SELECT id FROM row")
	if err != nil {
		t.Fatal(err)
	}
	defer rows.Close()
	if !rows.Next() {
		t.Fatal(rows.Err())
	}
	f.set("committed", 1)
	answer := make(chan error, 1)
	go func() { answer <- s.Write(context.Background(), insert(2)) }()
	was := f.hit("checkpoint")
	eventually(t, "the writer tries again", func() bool { return f.hit("checkpoint") > was+3 })
	select {
	case err := <-answer:
		t.Fatalf("answered %v", err)
	default:
	}
	if err := rows.Close(); err != nil {
		t.Error(err)
	}
	if err := <-answer; err != nil || !has(t, s, 2) {
		t.Errorf("answered %v", err)
	}
}

// While the fate of a COMMIT is unknown another process commits, and the common commit_seq passes the number in doubt.
func TestAnotherProcessesCommitIsNotTakenForTheUnknownOne(t *testing.T) {
	f := newFaults()
	s := newStore(t, Options{fault: f.at})
	other := open(t, s.Path(), Options{})
	f.when("connect", func() {
		for i := range int64(5) {
			if err := other.Write(context.Background(), insert(i+10)); err != nil {
				t.Error(err)
			}
		}
	})
	f.set("commit", 1)
	if err := s.Write(t.Context(), insert(1)); err == nil || errors.Is(err, ErrUnknown) {
		t.Errorf("answered %v", err)
	}
	f.when("connect", nil)
	if has(t, s, 1) || !has(t, s, 14) {
		t.Error("row 1 is there, or row 14 is not")
	}
}

func TestBrokenConnectionIsReplaced(t *testing.T) {
	s := newStore(t, Options{})
	breaks := func(_ context.Context, tx *Tx) error { return tx.conn.Close() }
	if err := s.Write(t.Context(), breaks); err == nil || errors.Is(err, ErrUnknown) {
		t.Errorf("a unit without a connection was answered %v", err)
	}
	wantAnswers(t, group(t, s, insert(1), breaks, insert(2)), isNil, func(err error) bool { return err != nil }, isNil)
	if !has(t, s, 1) || !has(t, s, 2) {
		t.Error("a neighbour's row is missing")
	}
}

func TestFailedBeginChangesNothing(t *testing.T) {
	f := newFaults()
	s := newStore(t, Options{fault: f.at})
	before := commitSeq(t, s)
	f.set("begin", 1)
	if err := s.Write(t.Context(), insert(1)); err == nil {
		t.Error("no error")
	}
	if err := s.Write(t.Context(), insert(2)); err != nil {
		t.Error(err)
	}
	if has(t, s, 1) || !has(t, s, 2) || commitSeq(t, s) != before+1 {
		t.Error("the failed transaction left something")
	}
}

func TestGoexitInAUnitEndsTheStore(t *testing.T) {
	path := newPath(t)
	s, err := Open(t.Context(), path, rowsSchema, Options{Create: true})
	if err != nil {
		t.Fatal(err)
	}
	err = s.Write(t.Context(), func(ctx context.Context, tx *Tx) error {
		_ = insert(1)(ctx, tx)
		runtime.Goexit() // as t.FailNow does
		return nil
	})
	if !errors.Is(err, ErrClosed) {
		t.Errorf("answered %v", err)
	}
	if err := s.Write(t.Context(), insert(2)); !errors.Is(err, ErrClosed) {
		t.Errorf("answered %v", err)
	}
	if err := s.Close(); err != nil {
		t.Error(err)
	}
	if s = open(t, path, Options{}); has(t, s, 1) {
		t.Error("row 1 is there")
	}
}

func TestRowsOfWritersLongGoneAreSwept(t *testing.T) {
	wall := time.Now()
	o := Options{Create: true, Clocks: Clocks{Wall: func() time.Time { return wall }}}
	path := newPath(t)
	s := open(t, path, o)
	if err := s.Write(t.Context(), func(ctx context.Context, tx *Tx) error {
		_, _, err := tx.Exec(ctx, "UPDATE meta SET commit_seq = commit_seq + 2000")
		return err
	}); err != nil {
		t.Fatal(err)
	}
	count := func() int64 { return number(t, s, "SELECT count(*) FROM writer") }
	wall = wall.Add(25 * time.Hour)
	other := open(t, path, o)
	if n := count(); n != 1 {
		t.Errorf("%d writers, want the new one alone", n)
	}
	if err := barrier(t, s); err != nil { // not dead after all
		t.Error(err)
	}
	if err := barrier(t, other); err != nil {
		t.Error(err)
	}
	if n := count(); n != 2 {
		t.Errorf("%d writers, want 2", n)
	}
}

func TestBusyWriterFailsWithoutAChange(t *testing.T) {
	path := newPath(t)
	f := newFaults()
	s := open(t, path, Options{Create: true, BusyTimeout: 30 * time.Millisecond, fault: f.at})
	lines, cmd, goOn := started(t, "hold", path)
	wantLine(t, lines, "holding")
	before, start := commitSeq(t, s), time.Now()
	if err := s.Write(t.Context(), insert(1)); !errors.Is(err, ErrBusy) {
		t.Errorf("answered %v", err)
	}
	if took := time.Since(start); took < 30*time.Millisecond || took > 4*time.Second {
		t.Errorf("gave up after %v", took)
	}
	if _, err := Open(t.Context(), path, rowsSchema, Options{BusyTimeout: time.Millisecond}); !errors.Is(err, ErrBusy) {
		t.Errorf("Open: %v", err)
	}
	if has(t, s, 1) || commitSeq(t, s) != before {
		t.Error("something changed")
	}
	// Close does not wait for the other process.
	patient, err := Open(t.Context(), path, rowsSchema, Options{BusyTimeout: time.Hour, ReadOnly: true})
	if err != nil {
		t.Fatal(err)
	}
	if err := patient.Write(t.Context(), insert(1)); err == nil {
		t.Error("a store opened for reading wrote")
	}
	if err := patient.Close(); err != nil {
		t.Error(err)
	}
	s.writer.o.BusyTimeout = time.Hour
	begun := f.hit("begin")
	waiting := make(chan error, 1)
	go func() { waiting <- s.Write(context.Background(), insert(1)) }()
	eventually(t, "the unit is in hand", func() bool { return f.hit("begin") > begun })
	if err := s.Close(); err != nil {
		t.Error(err)
	}
	if err := <-waiting; !errors.Is(err, ErrClosed) {
		t.Errorf("answered %v", err)
	}
	goOn()
	if err := cmd.Wait(); err != nil {
		t.Error(err)
	}
	if s = open(t, path, Options{}); has(t, s, 1) {
		t.Error("row 1 is there")
	}
}

func TestTwoProcessesWriteTheSameFile(t *testing.T) {
	s := newStore(t, Options{})
	type process struct {
		in  int
		err error
	}
	done := make(chan process, 2)
	for range 2 {
		cmd := command(t, "write", s.Path())
		go func() {
			out, err := cmd.Output()
			done <- process{strings.Count(string(out), "\nin "), err}
		}()
	}
	own := int64(0)
	for left := 2; left > 0; {
		select {
		case p := <-done:
			if p.in != 100 || p.err != nil {
				t.Errorf("a process wrote %d rows, want 100; %v", p.in, p.err)
			}
			left--
		default:
			if err := s.Write(t.Context(), insert(-1-own)); err != nil {
				t.Fatal(err)
			}
			own++
		}
	}
	if n := number(t, s, "SELECT count(*) FROM row"); n != 200+own {
		t.Errorf("%d rows, want %d", n, 200+own)
	}
	if n := commitSeq(t, s); n != 1+own+2*(1+100) {
		t.Errorf("commit_seq %d after %d commits", n, 1+own+2*(1+100))
	}
}

func TestMetricsLastAsLongAsTheStore(t *testing.T) {
	reg := prometheus.NewPedanticRegistry()
	for range 2 {
		s, err := Open(t.Context(), newPath(t), rowsSchema, Options{Create: true, Metrics: reg})
		if err != nil {
			t.Fatal(err)
		}
		if _, err := Open(t.Context(), newPath(t), rowsSchema, Options{Create: true, Metrics: reg}); err == nil {
			t.Error("two stores under one name")
		}
		families, err := reg.Gather()
		if err != nil {
			t.Fatal(err)
		}
		got := map[string]float64{}
		for _, f := range families {
			m := f.GetMetric()[0]
			got[f.GetName()] = m.GetGauge().GetValue() + float64(m.GetHistogram().GetSampleCount())
		}
		if len(got) != 5 || got["postrider_commit_duration_seconds"] != 1 || got["postrider_commit_units"] != 1 ||
			got["postrider_store_bytes"] < 4096 || got["postrider_store_wal_bytes"] < 4096 || got["postrider_store_free_bytes"] < 4096 {
			t.Errorf("gathered %v", got)
		}
		if err := s.Close(); err != nil {
			t.Error(err)
		}
	}
	families, err := reg.Gather()
	if err != nil || len(families) != 0 {
		t.Errorf("after Close: %v, %v", families, err)
	}
}
