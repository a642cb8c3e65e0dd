package executor

import (
	"bytes"
	"context"
	"database/sql"
	"fmt"
	"net/url"
	"path/filepath"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"postrider/internal/agent"
	"postrider/internal/sqlite"
)

const (
	benchRounds = 5
	benchSteps  = 4096 // of a round, over all runs
	stateSize   = 1024
	dataSize    = 300
)

// BenchmarkSteps compares the executor with a bare loop on the same disk: the SQL effect of a step (an input consumed,
// the next checkpoint with 1 KiB of state, two records of 300 B, branch and run moved on), one step per transaction, on
// one prepared connection with the same pragmas and the same schema. The loop claims nothing, looks for nothing, checks
// nothing and calls nobody. Each step of either consumes an input that was stored before the clock ran. The two take
// turns, and ratio is the median of the rounds' ratios, so that a disk with moods meets both.
func BenchmarkSteps(b *testing.B) {
	for _, c := range []struct {
		runs int
		bar  float64
	}{{1, 0.6}, {64, 4}} {
		b.Run(fmt.Sprintf("runs=%d", c.runs), func(b *testing.B) {
			whole, bare := newBenchNode(b, c.runs), newBareLoop(b, c.runs)
			var wholeTime, bareTime time.Duration
			var ratios []float64
			b.ReportAllocs()
			for b.Loop() { // an iteration is all rounds, whatever -benchtime says
				for range benchRounds {
					w := whole.round(b)
					l := bare.round(b)
					ratios = append(ratios, l.Seconds()/w.Seconds())
					wholeTime, bareTime = wholeTime+w, bareTime+l
				}
			}
			slices.Sort(ratios)
			n := float64(len(ratios) * benchSteps)
			b.ReportMetric(n/wholeTime.Seconds(), "steps/s")
			b.ReportMetric(n/bareTime.Seconds(), "bare-steps/s")
			b.ReportMetric(n/float64(whole.commits), "steps/commit")
			b.ReportMetric(ratios[len(ratios)/2], "ratio")
			b.ReportMetric(c.bar, "bar")
		})
	}
}

// padded is a JSON object of size bytes that holds n.
func padded(n int64, size int) []byte {
	head, tail := fmt.Appendf(make([]byte, 0, size), `{"n":%d,"pad":"`, n), `"}`
	head = append(head, bytes.Repeat([]byte("x"), size-len(head)-len(tail))...)
	return append(head, tail...)
}

// benchAgent changes all of its state's size every step, and emits two events.
func benchAgent(_ context.Context, s agent.Step) (agent.Effects, error) {
	return agent.Effects{
		State: padded(s.Number, stateSize),
		Events: []agent.Event{
			{Type: "counted", Data: padded(2*s.Number, dataSize)},
			{Type: "counted", Data: padded(2*s.Number+1, dataSize)},
		},
	}, nil
}

type benchNode struct {
	store   *sqlite.Store
	runs    int
	commits int64 // while the clock ran
}

func openBenchStore(b *testing.B, path string) *sqlite.Store {
	b.Helper()
	s, err := sqlite.Open(b.Context(), path, sqlite.NodeSchema(schemaText(), "n1", path), sqlite.Options{Create: true})
	if err != nil {
		b.Fatal(err)
	}
	return s
}

func newBenchNode(b *testing.B, runs int) *benchNode {
	b.Helper()
	n := &benchNode{store: openBenchStore(b, filepath.Join(b.TempDir(), "node.db")), runs: runs}
	b.Cleanup(func() {
		if err := n.store.Close(); err != nil {
			b.Error(err)
		}
	})
	if err := New(n.store, "n1", one(benchAgent), Options{}).recover(b.Context()); err != nil { // Submit wants to know the agent
		b.Fatal(err)
	}
	return n
}

// feed stores the inputs of one round.
func feed(b *testing.B, s *sqlite.Store, runs, inputs int) {
	b.Helper()
	var next atomic.Int64
	var wg sync.WaitGroup
	for range 128 {
		wg.Go(func() {
			for i := next.Add(1); i <= int64(inputs); i = next.Add(1) {
				in := Input{Tenant: "d", Agent: "a", Run: fmt.Sprint("r", i%int64(runs)), Type: "t", Data: []byte(`{"go":1}`), Source: "cli"}
				if _, err := Submit(context.Background(), s, in); err != nil {
					b.Error(err)
					return
				}
			}
		})
	}
	if wg.Wait(); b.Failed() {
		b.FailNow()
	}
}

func (n *benchNode) commitSeq(b *testing.B) (seq int64) {
	b.Helper()
	if err := n.store.Reader().QueryRow("SELECT commit_seq FROM meta").Scan(&seq); err != nil {
		b.Fatal(err)
	}
	return seq
}

// round times a whole executor, from its start to the last step's commit.
func (n *benchNode) round(b *testing.B) time.Duration {
	b.Helper()
	feed(b, n.store, n.runs, benchSteps)
	before := n.commitSeq(b)
	var steps atomic.Int64
	all := make(chan struct{})
	e := New(n.store, "n1", one(benchAgent), Options{Notify: func() { // once per step, after its commit
		if steps.Add(1) == benchSteps {
			close(all)
		}
	}})
	ctx, cancel := context.WithCancel(b.Context())
	defer cancel()
	done := make(chan error, 1)
	runtime.GC()
	begin := time.Now()
	go func() { done <- e.Run(ctx) }()
	select {
	case <-all:
	case err := <-done:
		b.Fatalf("Run ended early: %v", err)
	case <-time.After(2 * time.Minute):
		b.Fatalf("%d steps of %d in two minutes", steps.Load(), benchSteps)
	}
	took := time.Since(begin)
	cancel()
	if err := <-done; err != nil {
		b.Fatal(err)
	}
	n.commits += n.commitSeq(b) - before
	return took
}

// bareLoop is what the executor is measured against.
type bareLoop struct {
	conn     *sql.Conn
	branches []bareBranch
	stmts    map[string]*sql.Stmt
}

type bareBranch struct {
	run, id, step, lsn, tail, checkpoint, bytes int64
	inputs                                      []int64 // to consume, in their order
}

func newBareLoop(b *testing.B, runs int) *bareLoop {
	b.Helper()
	path := filepath.Join(b.TempDir(), "bare.db")
	s := openBenchStore(b, path)
	if err := New(s, "n1", one(benchAgent), Options{}).recover(b.Context()); err != nil {
		b.Fatal(err)
	}
	feed(b, s, runs, runs) // makes the runs; these inputs are the patterns for those of the rounds
	if err := s.Close(); err != nil {
		b.Fatal(err)
	}
	u := url.URL{Scheme: "file", Path: path}
	db, err := sql.Open("sqlite", u.String()+"?mode=rw&_busy_timeout=5000&_journal_mode=WAL&_synchronous=FULL&_foreign_keys=on&_dqs=0")
	if err != nil {
		b.Fatal(err)
	}
	l := &bareLoop{stmts: map[string]*sql.Stmt{}}
	if l.conn, err = db.Conn(b.Context()); err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() {
		for _, st := range l.stmts {
			_ = st.Close()
		}
		_ = l.conn.Close()
		if err := db.Close(); err != nil {
			b.Error(err)
		}
	})
	var mode string
	var synchronous int
	err = l.conn.QueryRowContext(b.Context(), "SELECT (SELECT journal_mode FROM pragma_journal_mode), (SELECT synchronous FROM pragma_synchronous)").Scan(&mode, &synchronous)
	if err != nil || mode != "wal" || synchronous != 2 {
		b.Fatalf("journal_mode %s, synchronous %d, error %v: that is no equal", mode, synchronous, err)
	}
	rows, err := l.conn.QueryContext(b.Context(), "SELECT run, id, head_lsn, tail_id, head_id, head_bytes FROM branch ORDER BY id")
	if err != nil {
		b.Fatal(err)
	}
	defer rows.Close()
	for rows.Next() {
		var br bareBranch
		if err := rows.Scan(&br.run, &br.id, &br.lsn, &br.tail, &br.checkpoint, &br.bytes); err != nil {
			b.Fatal(err)
		}
		l.branches = append(l.branches, br)
	}
	return l
}

func (l *bareLoop) exec(b *testing.B, query string, args ...any) (id int64) {
	st := l.stmts[query]
	if st == nil {
		var err error
		if st, err = l.conn.PrepareContext(context.Background(), query); err != nil {
			b.Fatal(err)
		}
		l.stmts[query] = st
	}
	res, err := st.ExecContext(context.Background(), args...)
	if err != nil {
		b.Fatalf("%s: %v", query, err)
	}
	if id, err = res.LastInsertId(); err != nil {
		b.Fatal(err)
	}
	return id
}

// feed stores the inputs of one round.
func (l *bareLoop) feed(b *testing.B) {
	l.exec(b, "BEGIN IMMEDIATE")
	for i := range benchSteps {
		br := &l.branches[i%len(l.branches)]
		br.inputs = append(br.inputs, l.exec(b, `INSERT INTO inbox (run, tenant, run_name, agent, input_id, type, source, arrived_us, due_us, data)
			SELECT run, tenant, run_name, agent, lower(hex(randomblob(13))), type, source, ?1, ?1, data FROM inbox WHERE run = ?2 LIMIT 1`,
			time.Now().UnixMicro(), br.run))
	}
	l.exec(b, "COMMIT")
}

func (l *bareLoop) round(b *testing.B) time.Duration {
	b.Helper()
	l.feed(b)
	runtime.GC()
	begin := time.Now()
	for i := range benchSteps {
		l.step(b, &l.branches[i%len(l.branches)])
	}
	return time.Since(begin)
}

func (l *bareLoop) step(b *testing.B, br *bareBranch) {
	now := time.Now().UnixMicro()
	input := br.inputs[0]
	br.inputs = br.inputs[1:]
	br.step++
	l.exec(b, "BEGIN IMMEDIATE")
	l.exec(b, "UPDATE inbox SET consumed_branch = ?, consumed_step = ? WHERE id = ?", br.id, br.step, input)
	first := int64(0)
	for i := range int64(2) {
		data := padded(2*br.step+i, dataSize)
		br.bytes += int64(len(data) + len("counted"))
		br.tail = l.exec(b, `INSERT INTO outbox (prev_id, branch, lsn, step, kind, prevlsn, bytes, occurred_us, recorded_us, type, correlation, causation, data)
			VALUES (?, ?, ?, ?, 1, ?, ?, ?, ?, 'counted', ?, ?, ?)`,
			br.tail, br.id, br.lsn+1, br.step, br.lsn, br.bytes, now, now, "01JZ0000000000000000000000", "01JZ0000000000000000000000", data)
		br.lsn++
		if i == 0 {
			first = br.tail
		}
	}
	br.checkpoint = l.exec(b, `INSERT INTO checkpoint (branch, step, prev_id, next, input, lsn, event_lsn, bytes, started_us, committed_us, codec, state)
		VALUES (?, ?, ?, 'wait', ?, ?, ?, ?, ?, ?, 1, ?)`,
		br.id, br.step, br.checkpoint, input, br.lsn, br.lsn, br.bytes, now, now, padded(br.step, stateSize))
	l.exec(b, `UPDATE branch SET head_step = ?2, head_lsn = ?3, event_lsn = ?3, head_id = ?4, tail_id = ?5, head_bytes = ?6, exportable = ?3,
		export_bytes = ?6, backlog_id = iif(shipped < exportable, backlog_id, ?7) WHERE id = ?1`,
		br.id, br.step, br.lsn, br.checkpoint, br.tail, br.bytes, first)
	l.exec(b, "UPDATE run SET status = 'idle', wake_us = NULL, updated_us = ? WHERE id = ?", now, br.run)
	l.exec(b, "COMMIT")
}
