package outbox

import (
	"context"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"go.uber.org/goleak"

	"postrider/internal/record"
	"postrider/internal/sqlite"
)

func TestMain(m *testing.M) {
	// Each case commits some dozens of times; -rapid.checks on the command line asks for more of them.
	if err := flag.Set("rapid.checks", "10"); err != nil {
		panic(err)
	}
	goleak.VerifyTestMain(m)
}

// box is an outbox on a real database, with runs and branches made directly: what executor does, without its steps.
type box struct {
	*Outbox
	t     fataler
	store *sqlite.Store
	path  string
	heads map[int64]Head
	n     int // branches made
}

// fataler is a *testing.T or a *rapid.T.
type fataler interface {
	Helper()
	Fatalf(format string, args ...any)
}

func newBox(t *testing.T) *box {
	t.Helper()
	path := filepath.Join(t.TempDir(), "node.db")
	b := &box{t: t, path: path, heads: map[int64]Head{}}
	b.store = openStore(t, path)
	b.Outbox = New(b.store, "n1")
	return b
}

func openStore(t *testing.T, path string) *sqlite.Store {
	t.Helper()
	s, err := sqlite.Open(t.Context(), path, sqlite.NodeSchema(schemaText(t), "n1", path), sqlite.Options{Create: true})
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

// schemaText is the root's schema.sql.
func schemaText(t *testing.T) string {
	t.Helper()
	dir, err := os.Getwd()
	if err != nil {
		t.Fatal(err)
	}
	for ; ; dir = filepath.Dir(dir) {
		if _, err := os.Stat(filepath.Join(dir, "go.mod")); err == nil {
			break
		}
	}
	b, err := os.ReadFile(filepath.Join(dir, "schema.sql"))
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}

func (b *box) write(unit sqlite.Unit) {
	b.t.Helper()
	if err := b.store.Write(context.Background(), unit); err != nil {
		b.t.Fatalf("write: %v", err)
	}
}

func (b *box) exec(query string, args ...any) {
	b.t.Helper()
	b.write(func(ctx context.Context, tx *sqlite.Tx) error {
		_, _, err := tx.Exec(ctx, query, args...)
		return err
	})
}

func (b *box) number(query string, args ...any) (n int64) {
	b.t.Helper()
	if err := b.store.Reader().QueryRowContext(context.Background(), query, args...).Scan(&n); err != nil {
		b.t.Fatalf("%s: %v", query, err)
	}
	return n
}

// root makes a run with its root branch, empty.
func (b *box) root(tenant string) (branch int64) {
	b.t.Helper()
	b.write(func(ctx context.Context, tx *sqlite.Tx) error {
		_, run, err := tx.Exec(ctx, `INSERT INTO run (tenant, name, agent, live, gens, status, created_us, updated_us) VALUES (?, ?, 'a', 0, 0, 'idle', 0, 0)`,
			tenant, fmt.Sprintf("r%d", b.n))
		if err != nil {
			return err
		}
		branch, err = b.insertBranch(ctx, tx, run, tenant, nil, Head{})
		return err
	})
	b.heads[branch] = Head{Branch: branch}
	return branch
}

func (b *box) insertBranch(ctx context.Context, tx *sqlite.Tx, run int64, tenant string, parent any, fork Head) (int64, error) {
	b.n++
	_, id, err := tx.Exec(ctx, `INSERT INTO branch (ulid, run, tenant, gen, epoch, parent, fork_step, fork_lsn, opened_us,
		head_step, head_lsn, event_lsn, head_id, tail_id, head_bytes, exportable, export_bytes, shipped, shipped_bytes, shipped_us, backlog_id)
		VALUES (?1, ?2, ?3, (SELECT count(*) + 1 FROM branch WHERE run = ?2), 1, ?4, 0, ?5, ?6, 0, ?5, ?7, 0, 0, 0, ?5, 0, ?5, 0, ?6, 0)`,
		fmt.Sprintf("01J%023d", b.n), run, tenant, parent, fork.LSN, tx.NowUS, fork.EventLSN)
	return id, err
}

// add appends records to a live branch as a step does.
func (b *box) add(branch int64, records ...record.Record) {
	b.t.Helper()
	var head Head
	b.write(func(ctx context.Context, tx *sqlite.Tx) (err error) {
		head, err = b.append(ctx, tx, branch, records)
		return err
	})
	b.heads[branch] = head
}

func (b *box) append(ctx context.Context, tx *sqlite.Tx, branch int64, records []record.Record) (Head, error) {
	head, err := Append(ctx, tx, b.heads[branch], 1, records)
	if err != nil {
		return head, err
	}
	_, _, err = tx.Exec(ctx, `UPDATE branch SET head_lsn = ?2, event_lsn = ?3, tail_id = ?4, head_bytes = ?5, exportable = ?2, export_bytes = ?5,
		backlog_id = iif(shipped < exportable, backlog_id, ?6) WHERE id = ?1`,
		branch, head.LSN, head.EventLSN, head.TailID, head.Bytes, head.TailID-int64(len(records))+1)
	return head, err
}

// fill appends n small events at once.
func (b *box) fill(branch int64, n int) {
	b.t.Helper()
	records := make([]record.Record, n)
	for i := range records {
		records[i] = event(fmt.Sprintf(`{"n":%d}`, i))
	}
	b.add(branch, records...)
}

// bulk appends n events by one statement, for backlogs that fill would take too long for.
func (b *box) bulk(branch int64, n int64) {
	b.t.Helper()
	b.write(func(ctx context.Context, tx *sqlite.Tx) error {
		var base int64
		if err := tx.Get(ctx, "SELECT COALESCE((SELECT seq FROM sqlite_sequence WHERE name = 'outbox'), 0)", nil, &base); err != nil {
			return err
		}
		_, last, err := tx.Exec(ctx, `INSERT INTO outbox (prev_id, branch, lsn, step, kind, prevlsn, bytes, occurred_us, recorded_us, type, data)
			WITH RECURSIVE n (i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < ?1)
			SELECT iif(i = 1, NULL, ?2 + i - 1), ?3, i, 1, 1, i - 1, i * 2, 1, ?4, 'e', x'30' FROM n`, n, base, branch, tx.NowUS)
		if err != nil {
			return err
		}
		b.heads[branch] = Head{Branch: branch, LSN: n, EventLSN: n, TailID: last, Bytes: 2 * n}
		_, _, err = tx.Exec(ctx, `UPDATE branch SET head_lsn = ?2, event_lsn = ?2, tail_id = ?3, head_bytes = 2 * ?2, exportable = ?2,
			export_bytes = 2 * ?2, backlog_id = ?4 WHERE id = ?1`, branch, n, last, base+1)
		return err
	})
}

// rewind forks branch at an LSN of its own and leaves the lineage below; the branches in below are abandoned whole.
func (b *box) rewind(branch, lsn int64, below ...int64) (child int64) {
	b.t.Helper()
	b.write(func(ctx context.Context, tx *sqlite.Tx) error {
		var bytes, run, event int64
		var tenant string
		if err := tx.Get(ctx, "SELECT bytes, max(iif(kind = 1, lsn, 0), prevlsn) FROM outbox WHERE branch = ? AND lsn = ?", []any{branch, lsn}, &bytes, &event); err != nil {
			return err
		}
		if err := tx.Get(ctx, "UPDATE branch SET exportable = ?, export_bytes = ? WHERE id = ? RETURNING run, tenant", []any{lsn, bytes, branch}, &run, &tenant); err != nil {
			return err
		}
		for _, id := range below {
			if _, _, err := tx.Exec(ctx, "UPDATE branch SET exportable = fork_lsn, export_bytes = 0 WHERE id = ?", id); err != nil {
				return err
			}
		}
		if _, _, err := tx.Exec(ctx, "UPDATE meta SET rewinds = rewinds + 1 WHERE id = 1"); err != nil {
			return err
		}
		var err error
		if child, err = b.insertBranch(ctx, tx, run, tenant, branch, Head{LSN: lsn, EventLSN: event}); err != nil {
			return err
		}
		b.heads[child] = Head{Branch: child, LSN: lsn, EventLSN: event}
		head, err := b.append(ctx, tx, child, []record.Record{event1("opened")})
		b.heads[child] = head
		return err
	})
	return child
}

func (b *box) drain(c *Cursor, limit int) []Item {
	b.t.Helper()
	items, err := b.Drain(context.Background(), "", c, limit)
	if err != nil {
		b.t.Fatalf("drain: %v", err)
	}
	if len(items) > limit {
		b.t.Fatalf("drained %d items with limit %d", len(items), limit)
	}
	return items
}

// drainAll drains to the end.
func (b *box) drainAll(c *Cursor, limit int) (all []Item) {
	b.t.Helper()
	for {
		items := b.drain(c, limit)
		if len(items) == 0 {
			return all
		}
		all = append(all, items...)
	}
}

func (b *box) lease() int64 {
	b.t.Helper()
	fence, err := b.Lease(context.Background(), "test")
	if err != nil {
		b.t.Fatalf("lease: %v", err)
	}
	return fence
}

func shippedUpTo(it Item) Shipped {
	return Shipped{Branch: it.Branch, LSN: it.LSN, Bytes: it.Bytes, Recorded: it.Recorded}
}

func event(data string) record.Record {
	return record.Record{Kind: record.Event, Type: "e", Data: []byte(data), Occurred: 1}
}

func event1(typ string) record.Record {
	return record.Record{Kind: record.Event, Type: typ, Data: []byte("null"), Occurred: 1}
}

func message(topic string) record.Record {
	return record.Record{Kind: record.Message, Topic: topic, Data: []byte{0xff}, Occurred: 1}
}

func command(run string) record.Record {
	return record.Record{Kind: record.Command, Type: "c", ToNode: "n2", ToAgent: "b", ToRun: run, InputID: "pr:x", Hops: 1, Data: []byte("{}"), Occurred: 1}
}

// lsns lists what was drained of one branch.
func lsns(items []Item, branch int64) (list []int64) {
	for _, it := range items {
		if it.Branch == branch {
			list = append(list, it.LSN)
		}
	}
	return list
}

func upTo(from, to int64) (list []int64) {
	for n := from; n <= to; n++ {
		list = append(list, n)
	}
	return list
}
