package sqlite

import (
	"context"
	"database/sql"
	"fmt"
	"os"
	"sync"
	"testing"
	"time"
)

// dueNow is a unit after which trim looks at the WAL whatever it decided before by the clock. A unit runs on the goroutine
// that owns these fields.
func dueNow(s *Store, unit Unit) Unit {
	return func(ctx context.Context, tx *Tx) error {
		s.writer.trimAt = time.Time{}
		return unit(ctx, tx)
	}
}

func walSize(t *testing.T, s *Store) int64 {
	t.Helper()
	fi, err := os.Stat(s.Path() + "-wal")
	if err != nil {
		t.Fatal(err)
	}
	return fi.Size()
}

// relay is readers who hand over to each other: the next opens its snapshot before the oldest closes hers. Only who holds
// the baton may.
type relay struct {
	s     *Store
	baton chan struct{} // holds it
	held  []*sql.Rows
}

func (r *relay) run(ctx context.Context) error {
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-r.baton:
		}
		err := r.handOver()
		r.baton <- struct{}{}
		if err != nil {
			return err
		}
	}
}

func (r *relay) handOver() error {
	rows, err := r.s.Reader().Query("SELECT id FROM row ORDER BY id DESC LIMIT 500")
	if err != nil {
		return err
	}
	r.held = append(r.held, rows)
	if !rows.Next() {
		return fmt.Errorf("no row: %w", rows.Err())
	}
	if len(r.held) <= 3 {
		return nil
	}
	rows, r.held = r.held[0], r.held[1:]
	return rows.Close()
}

// Some reader always holds a snapshot, though none for long. They stand still during each COMMIT and what SQLite's own
// checkpoint tries as a part of it, so that it always meets snapshots from before: by itself SQLite never starts such a
// WAL over. Between two commits they take turns, as fast as they can. The clock has no say: after each commit trim has a
// try, and 80 tries in a row would have to fail for the WAL to outgrow the bound.
func TestWALStaysBoundedBesideReaders(t *testing.T) {
	if testing.Short() {
		t.Skip("600 commits of 64 KiB")
	}
	f := newFaults()
	s := newStore(t, Options{fault: f.at})
	if err := s.Write(t.Context(), insert(0)); err != nil {
		t.Fatal(err)
	}
	readers := &relay{s: s, baton: make(chan struct{}, 1)}
	for range 3 {
		if err := readers.handOver(); err != nil {
			t.Fatal(err)
		}
	}
	ctx, cancel := context.WithCancel(t.Context())
	var running sync.WaitGroup
	running.Go(func() {
		if err := readers.run(ctx); err != nil {
			t.Error(err)
		}
	})
	t.Cleanup(func() {
		cancel()
		running.Wait()
		for _, rows := range readers.held {
			if err := rows.Close(); err != nil {
				t.Error(err)
			}
		}
	})
	f.when("begin", func() { <-readers.baton })
	f.when("committed", func() { readers.baton <- struct{}{} })
	readers.baton <- struct{}{}

	var size, largest int64
	emptied, before := 0, f.hit("checkpoint")
	for i := range int64(600) {
		if err := s.Write(t.Context(), dueNow(s, blob(i+1, 64<<10))); err != nil {
			t.Fatal(err)
		}
		was := size
		if size = walSize(t, s); size < was {
			emptied++
		}
		largest = max(largest, size)
	}
	t.Logf("largest WAL %d KiB, emptied %d times in %d tries", largest>>10, emptied, f.hit("checkpoint")-before)
	if largest > 2*walLimit { // 40 MiB and more without trim
		t.Errorf("the WAL grew to %d KiB", largest>>10)
	}
}

// Each try beside a long reader holds the writers up for 50 ms, so tries become rare until one succeeds. Trim comes after
// the answer; what it did is looked at in the next unit, which also says whether the next try is due.
func TestTrimBacksOffBesideALongReader(t *testing.T) {
	f := newFaults()
	s := newStore(t, Options{fault: f.at})
	if err := s.Write(t.Context(), insert(0)); err != nil {
		t.Fatal(err)
	}
	long := &relay{s: s}
	if err := long.handOver(); err != nil {
		t.Fatal(err)
	}
	before := f.hit("checkpoint")
	if err := s.Write(t.Context(), blob(1, walLimit)); err != nil {
		t.Fatal(err)
	}
	look := func(due bool, tries int, pause time.Duration) {
		t.Helper()
		err := s.Write(t.Context(), func(context.Context, *Tx) error {
			if n := f.hit("checkpoint") - before; n != tries || s.writer.trimWait != pause {
				t.Errorf("%d tries, the next after %v, want %d and %v", n, s.writer.trimWait, tries, pause)
			}
			s.writer.trimAt = time.Now().Add(time.Hour)
			if due {
				s.writer.trimAt = time.Time{}
			}
			return nil
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	for i, ms := range []int{100, 200, 400, 800, 1600, 3200, 6400, 10_000, 10_000} {
		pause := time.Duration(ms) * time.Millisecond
		look(false, i+1, pause)
		look(true, i+1, pause)
	}
	look(false, 10, 10*time.Second)
	if err := long.held[0].Close(); err != nil {
		t.Fatal(err)
	}
	look(true, 10, 10*time.Second)
	look(false, 11, 0)
	if size := walSize(t, s); size > walLimit {
		t.Errorf("the WAL has %d KiB", size>>10)
	}
}
