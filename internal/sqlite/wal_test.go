package sqlite

import (
	"context"
	"os"
	"sync"
	"testing"
	"time"
)

// Some reader always holds a snapshot, though none for long: SQLite by itself never starts such a WAL over.
func TestWALStaysBoundedBesideReaders(t *testing.T) {
	if testing.Short() {
		t.Skip("8,000 commits")
	}
	s := newStore(t, Options{})
	if err := s.Write(t.Context(), insert(0)); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	var readers sync.WaitGroup
	for range 4 {
		readers.Go(func() {
			for ctx.Err() == nil {
				rows, err := s.Reader().Query("SELECT id FROM row ORDER BY id DESC LIMIT 500")
				if err != nil {
					t.Error(err)
					return
				}
				if !rows.Next() {
					t.Error("no row", rows.Err())
				}
				_ = wait(nil, 3*time.Millisecond) // its snapshot's life
				if err := rows.Close(); err != nil {
					t.Error(err)
				}
			}
		})
	}
	var largest int64
	var slowest time.Duration
	for i := range int64(8_000) {
		start := time.Now()
		if err := s.Write(ctx, insert(i+1)); err != nil {
			t.Fatal(err)
		}
		slowest = max(slowest, time.Since(start))
		if fi, err := os.Stat(s.Path() + "-wal"); err != nil {
			t.Fatal(err)
		} else {
			largest = max(largest, fi.Size())
		}
	}
	cancel()
	readers.Wait()
	t.Logf("largest WAL %d KiB, slowest write %v", largest>>10, slowest)
	if largest > 2*walLimit { // 240 MiB without trim
		t.Errorf("the WAL grew to %d KiB", largest>>10)
	}
}
