package sqlite

import (
	"context"
	"crypto/rand"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
)

// BenchmarkWrite commits units of the size of a step (1 KiB of state replaced, a checkpoint of it, two records of 300 B,
// one of 1,000 branches), one at a time and from 64 submitters. The two are compared in one run, and a unit's own cost
// without the disk is their lower bound.
func BenchmarkWrite(b *testing.B) {
	for _, c := range []struct {
		name       string
		submitters int
	}{{"alone", 1}, {"submitters=64", 64}} {
		b.Run(c.name, func(b *testing.B) {
			s := benchStore(b)
			before := commitSeq(b, s)
			b.ReportAllocs()
			work, units := make(chan struct{}, 256), 0
			var wg sync.WaitGroup
			for range c.submitters {
				wg.Go(func() {
					for range work {
						if err := s.Write(context.Background(), step); err != nil {
							b.Error(err)
						}
					}
				})
			}
			if c.submitters == 1 {
				for b.Loop() {
					if err := s.Write(context.Background(), step); err != nil {
						b.Fatal(err)
					}
					units++
				}
			} else {
				for b.Loop() {
					work <- struct{}{}
					units++
				}
			}
			close(work)
			wg.Wait()
			seconds := b.Elapsed().Seconds()
			b.ReportMetric(float64(units)/seconds, "units/s")
			b.ReportMetric(float64(commitSeq(b, s)-before)/seconds, "commits/s")
		})
	}
}

var (
	state   = []byte(strings.Repeat(rand.Text(), 1024/26+1)[:1024])
	payload = state[:300]
	steps   atomic.Int64
)

func step(ctx context.Context, tx *Tx) error {
	n := steps.Add(1)
	branch := (n * 7919) % 1000
	if _, _, err := tx.Exec(ctx, "INSERT INTO head (branch, step, state) VALUES (?, ?, ?) ON CONFLICT (branch) DO UPDATE SET step = excluded.step, state = excluded.state", branch, n, state); err != nil {
		return err
	}
	if _, _, err := tx.Exec(ctx, "INSERT INTO checkpoint (branch, step, at_us, state) VALUES (?, ?, ?, ?)", branch, n, tx.NowUS, state); err != nil {
		return err
	}
	for lsn := range int64(2) {
		if _, _, err := tx.Exec(ctx, "INSERT INTO outbox (branch, lsn, at_us, data) VALUES (?, ?, ?, ?)", branch, 2*n+lsn, tx.NowUS, payload); err != nil {
			return err
		}
	}
	return nil
}

func benchStore(b *testing.B) *Store {
	b.Helper()
	schema := rowsSchema
	schema.Text += `
CREATE TABLE head (branch INTEGER PRIMARY KEY, step INTEGER, state BLOB) STRICT;
CREATE TABLE checkpoint (id INTEGER PRIMARY KEY AUTOINCREMENT, branch INTEGER, step INTEGER, at_us INTEGER, state BLOB) STRICT;
CREATE TABLE outbox (id INTEGER PRIMARY KEY AUTOINCREMENT, branch INTEGER, lsn INTEGER, at_us INTEGER, data BLOB) STRICT;
`
	s, err := Open(b.Context(), newPath(b), schema, Options{Create: true})
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() { _ = s.Close() })
	return s
}
