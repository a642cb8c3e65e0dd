package outbox

import (
	"context"
	"database/sql"
	"fmt"
	"slices"
	"time"

	"postrider/internal/record"
)

const (
	stride     = 16      // of the sparse index outbox_mark
	quantum    = 64      // records of one branch in its turn; a multiple of stride, so that no walked row is wasted
	drainBytes = 1 << 20 // of one Drain, checked per turn; a single larger record still comes
)

// Item is one pending record, with what Ack needs.
type Item struct {
	record.Record
	Branch int64 // row id
	Bytes  int64 // cumulative in the branch
}

// Cursor is how far a session has come: per branch, what was handed out and not yet acknowledged; per tenant, whose turn
// it is. Drain moves it. The zero value starts at the shipped marks. It belongs to one goroutine.
type Cursor struct {
	branches map[int64]position
	tenants  map[string]*turn
	tenant   string // served last
}

type position struct{ lsn, bytes int64 }

// turn is a tenant's place in its ring of branches with a backlog, which are in order of backlog_id.
type turn struct {
	seen int64 // highest backlog_id met: higher ones are new and go first, with one quantum
	at   int64 // backlog_id served last
}

// Settle forgets a branch's position once everything handed out is acknowledged; the shipped mark says the same.
func (c *Cursor) Settle(branch, lsn int64) {
	if c.branches[branch].lsn <= lsn {
		delete(c.branches, branch)
	}
}

// Return takes back items, in the order in which they were handed out, that will not be sent: the next Drain starts
// before them again.
func (c *Cursor) Return(items []Item) {
	for _, it := range slices.Backward(items) {
		c.branches[it.Branch] = position{it.LSN - 1, it.Bytes - size(&it.Record)}
	}
}

func (c *Cursor) turn(tenant string) *turn {
	if c.tenants == nil {
		c.tenants, c.branches = map[string]*turn{}, map[int64]position{}
	}
	if c.tenants[tenant] == nil {
		c.tenants[tenant] = &turn{}
	}
	return c.tenants[tenant]
}

// candidate is a branch with a backlog.
type candidate struct {
	id, gen, epoch, shipped, shippedBytes, exportable, head, tail, backlog, hold int64
	run, ulid                                                                    string
	parent, parentShipped, parentExportable                                      sql.NullInt64
}

// Drain returns up to limit pending records after the cursor: ascending by LSN within a branch, branches in turn, one
// that is newly backlogged first with one quantum, a child only when its parent's kept prefix was handed out. tenant ""
// takes all tenants in turn.
func (o *Outbox) Drain(ctx context.Context, tenant string, after *Cursor, limit int) ([]Item, error) {
	if tenant != "" {
		return o.drainTenant(ctx, tenant, after, limit)
	}
	tenants, err := o.backlogged(ctx)
	if err != nil || len(tenants) == 0 {
		return nil, err
	}
	// The one after the tenant served last begins; each gets an even share, and what one leaves goes to the next.
	first, _ := slices.BinarySearch(tenants, after.tenant+"\x00")
	var items []Item
	for i := range tenants {
		t := tenants[(first+i)%len(tenants)]
		share := (limit - len(items) + len(tenants) - i - 1) / (len(tenants) - i)
		if share == 0 {
			break
		}
		more, err := o.drainTenant(ctx, t, after, share)
		if err != nil {
			return nil, err
		}
		items = append(items, more...)
		after.tenant = t
	}
	return items, nil
}

// backlogged lists the tenants with pending records, by one index step each.
func (o *Outbox) backlogged(ctx context.Context) ([]string, error) {
	rows, err := o.store.Reader().QueryContext(ctx, `WITH RECURSIVE t (tenant) AS (
		SELECT min(tenant) FROM branch WHERE shipped < exportable
		UNION ALL SELECT (SELECT min(tenant) FROM branch WHERE shipped < exportable AND tenant > t.tenant) FROM t WHERE t.tenant IS NOT NULL)
		SELECT tenant FROM t WHERE tenant IS NOT NULL LIMIT 100000`)
	if err != nil {
		return nil, fmt.Errorf("list backlogged tenants: %w", err)
	}
	defer rows.Close()
	var tenants []string
	for rows.Next() {
		var t string
		if err := rows.Scan(&t); err != nil {
			return nil, fmt.Errorf("list backlogged tenants: %w", err)
		}
		tenants = append(tenants, t)
	}
	return tenants, rows.Err()
}

func (o *Outbox) drainTenant(ctx context.Context, tenant string, after *Cursor, limit int) ([]Item, error) {
	t := after.turn(tenant)
	var items []Item
	budget := int64(drainBytes)
	// take serves one branch its turn and says whether there is room for another.
	take := func(c candidate) (bool, error) {
		more, err := o.take(ctx, tenant, c, after, min(quantum, limit-len(items)), budget)
		if err != nil {
			return false, err
		}
		for i := range more {
			budget -= size(&more[i].Record)
		}
		items = append(items, more...)
		return len(items) < limit && budget > 0, nil
	}
	// New ones first, but never more than half of the batch: a steady stream of them must not starve the ring.
	fresh, err := o.candidates(ctx, tenant, t.seen, max(1, limit/2/stride))
	if err != nil {
		return nil, err
	}
	for _, c := range fresh {
		room, err := take(c)
		if err != nil || !room {
			return items, err
		}
		t.seen = c.backlog
	}
	// Then the ring, once around at the most.
	start, wrapped := t.at, false
	for {
		page, err := o.candidates(ctx, tenant, t.at, 256)
		if err != nil {
			return nil, err
		}
		for _, c := range page {
			if wrapped && c.backlog > start {
				return items, nil
			}
			room, err := take(c)
			if err != nil {
				return nil, err
			}
			t.at, t.seen = c.backlog, max(t.seen, c.backlog)
			if !room {
				return items, nil
			}
		}
		if len(page) < 256 {
			if wrapped || start == 0 {
				t.at = 0
				return items, nil
			}
			t.at, wrapped = 0, true
		}
	}
}

func (o *Outbox) candidates(ctx context.Context, tenant string, after int64, limit int) ([]candidate, error) {
	rows, err := o.store.Reader().QueryContext(ctx, `SELECT b.id, b.gen, b.epoch, b.shipped, b.shipped_bytes, b.exportable, b.head_lsn, b.tail_id,
		b.backlog_id, COALESCE(b.hold_us, 0), r.name, b.ulid, b.parent, p.shipped, p.exportable
		FROM branch b JOIN run r ON r.id = b.run LEFT JOIN branch p ON p.id = b.parent
		WHERE b.tenant = ? AND b.shipped < b.exportable AND b.backlog_id > ? ORDER BY b.backlog_id LIMIT ?`, tenant, after, limit)
	if err != nil {
		return nil, fmt.Errorf("list backlogged branches of %s: %w", tenant, err)
	}
	defer rows.Close()
	var list []candidate
	for rows.Next() {
		var c candidate
		if err := rows.Scan(&c.id, &c.gen, &c.epoch, &c.shipped, &c.shippedBytes, &c.exportable, &c.head, &c.tail,
			&c.backlog, &c.hold, &c.run, &c.ulid, &c.parent, &c.parentShipped, &c.parentExportable); err != nil {
			return nil, fmt.Errorf("list backlogged branches of %s: %w", tenant, err)
		}
		list = append(list, c)
	}
	return list, rows.Err()
}

// take reads one branch's next records: from the next mark (or the tail) down the chain, then turned round.
func (o *Outbox) take(ctx context.Context, tenant string, c candidate, after *Cursor, limit int, budget int64) ([]Item, error) {
	from := position{c.shipped, c.shippedBytes}
	if p, ok := after.branches[c.id]; ok && p.lsn > from.lsn {
		from = p
	}
	if from.lsn >= c.exportable || c.hold > time.Now().UnixMicro() {
		return nil, nil
	}
	if c.parent.Valid && max(c.parentShipped.Int64, after.branches[c.parent.Int64].lsn) < c.parentExportable.Int64 {
		return nil, nil // the parent's kept prefix comes first
	}
	hi := min(c.exportable, from.lsn+int64(limit))
	if aligned := hi / stride * stride; aligned > from.lsn {
		hi = min(hi, aligned)
	}
	start := c.tail
	if mark := (hi + stride - 1) / stride * stride; mark <= c.head {
		err := o.store.Reader().QueryRowContext(ctx, "SELECT id FROM outbox WHERE branch = ? AND lsn = ? AND lsn % 16 = 0", c.id, mark).Scan(&start)
		if err != nil {
			return nil, fmt.Errorf("find record %d of branch %s: %w", mark, c.ulid, err)
		}
	}
	rows, err := o.store.Reader().QueryContext(ctx, `WITH RECURSIVE walk (id, prev_id, lsn) AS (
		SELECT id, prev_id, lsn FROM outbox WHERE id = ?1
		UNION ALL SELECT o.id, o.prev_id, o.lsn FROM walk w JOIN outbox o ON o.id = w.prev_id WHERE w.lsn > ?2 + 1)
		SELECT o.lsn, o.step, o.kind, o.prevlsn, o.bytes, o.occurred_us, o.recorded_us, o.type, COALESCE(o.subject, ''),
			COALESCE(o.correlation, ''), COALESCE(o.causation, ''), COALESCE(o.trace, ''), COALESCE(o.topic, ''), COALESCE(o.retain, 0),
			COALESCE(o.to_node, ''), COALESCE(o.to_agent, ''), COALESCE(o.to_run, ''), COALESCE(o.input_id, ''), COALESCE(o.hops, 0),
			COALESCE(o.expires_us, 0), o.data
		FROM walk w JOIN outbox o ON o.id = w.id WHERE w.lsn <= ?3 AND (o.bytes <= ?4 OR w.lsn = ?2 + 1)`,
		start, from.lsn, hi, from.bytes+budget)
	if err != nil {
		return nil, fmt.Errorf("read branch %s after %d: %w", c.ulid, from.lsn, err)
	}
	defer rows.Close()
	var items []Item
	for rows.Next() {
		it := Item{Branch: c.id, Record: record.Record{Node: o.node, Key: record.BranchKey{Tenant: tenant, Run: c.run, Branch: c.ulid}, Gen: c.gen, Epoch: c.epoch}}
		if err := rows.Scan(&it.LSN, &it.Step, &it.Kind, &it.PrevLSN, &it.Bytes, &it.Occurred, &it.Recorded, &it.Type, &it.Subject,
			&it.Correlation, &it.Causation, &it.Trace, &it.Topic, &it.Retain, &it.ToNode, &it.ToAgent, &it.ToRun, &it.InputID, &it.Hops,
			&it.Expires, &it.Data); err != nil {
			return nil, fmt.Errorf("read branch %s after %d: %w", c.ulid, from.lsn, err)
		}
		items = append(items, it)
	}
	if err := rows.Err(); err != nil {
		return nil, fmt.Errorf("read branch %s after %d: %w", c.ulid, from.lsn, err)
	}
	slices.Reverse(items)
	for i := range items {
		if want := from.lsn + 1 + int64(i); items[i].LSN != want {
			return nil, fmt.Errorf("branch %s has record %d where %d must be", c.ulid, items[i].LSN, want)
		}
	}
	if n := len(items); n > 0 {
		after.branches[c.id] = position{items[n-1].LSN, items[n-1].Bytes}
	}
	return items, nil
}
