package outbox

import (
	"context"
	"database/sql"
	"fmt"
	"math"
	"slices"

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
	// Withheld: a rewind took back what made this record, in its own row. It is passed over, not sent.
	Withheld bool
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
	at   int64 // backlog_id that the ring served last
	end  int64 // highest backlog_id of this round, so that it ends whatever comes meanwhile
	odd  int   // 0 and 1 in turn: whose is the odd record of a batch that new ones and the ring share
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

// candidate is a branch with a backlog.
type candidate struct {
	id, gen, epoch, shipped, shippedBytes, exportable, head, tail, backlog, hold int64
	run, ulid                                                                    string
	parent, parentShipped, parentExportable                                      sql.NullInt64
}

// Drain returns up to limit pending records after the cursor: ascending by LSN within a branch, branches in turn, one
// that is newly backlogged first with one quantum, a child only when its parent's kept prefix was handed out. tenant ""
// takes all tenants in turn. Fewer than limit are returned when there are no more, or when they are large. After an error
// the cursor counts nothing that nobody was given.
func (o *Outbox) Drain(ctx context.Context, tenant string, after *Cursor, limit int) ([]Item, error) {
	var items []Item
	var err error
	if tenant != "" {
		items, err = o.drainTenant(ctx, tenant, after, limit, drainBytes)
	} else {
		items, err = o.drainAll(ctx, after, limit)
	}
	if err != nil {
		after.Return(items)
		return nil, err
	}
	return items, nil
}

// drainAll is Drain over all tenants. With an error it returns what was handed out before.
func (o *Outbox) drainAll(ctx context.Context, after *Cursor, limit int) ([]Item, error) {
	tenants, err := o.backlogged(ctx)
	if err != nil {
		return nil, err
	}
	var items []Item
	budget := int64(drainBytes)
	for before := -1; before < len(items); {
		before = len(items)
		// The one after the tenant served last begins; each gets an even share, and what one leaves goes to the next.
		first, _ := slices.BinarySearch(tenants, after.tenant+"\x00")
		for i := range tenants {
			t, left := tenants[(first+i)%len(tenants)], len(tenants)-i
			share := (limit - len(items) + left - 1) / left
			if share == 0 || budget <= 0 {
				return items, nil
			}
			more, err := o.drainTenant(ctx, t, after, share, (budget+int64(left)-1)/int64(left))
			items = append(items, more...)
			if err != nil {
				return items, err
			}
			budget -= sizeOf(more)
			after.tenant = t
		}
	}
	return items, nil
}

const backloggedQuery = `WITH RECURSIVE t (tenant) AS (
	SELECT min(tenant) FROM branch WHERE shipped < exportable
	UNION ALL SELECT (SELECT min(tenant) FROM branch WHERE shipped < exportable AND tenant > t.tenant) FROM t WHERE t.tenant IS NOT NULL)
	SELECT tenant FROM t WHERE tenant IS NOT NULL LIMIT 100000`

// backlogged lists the tenants with pending records, by one index step each.
func (o *Outbox) backlogged(ctx context.Context) ([]string, error) {
	rows, err := o.store.Query(ctx, backloggedQuery)
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

// page is how many branches are looked up at once, at the most.
const page = 256

// drainTenant is Drain for one tenant. With an error it returns what was handed out before.
func (o *Outbox) drainTenant(ctx context.Context, tenant string, after *Cursor, limit int, budget int64) ([]Item, error) {
	t, err := o.turn(ctx, tenant, after)
	if err != nil {
		return nil, err
	}
	var items []Item
	// serve gives a branch its turn, as far as fewer than upTo records are there and bytes are left.
	serve := func(c candidate, upTo int, bytes int64) error {
		more, err := o.take(ctx, tenant, c, after, min(quantum, upTo-len(items)), bytes)
		budget -= sizeOf(more)
		items = append(items, more...)
		return err
	}
	// New ones first, with half of the batch at the most: a steady stream of them must not starve the ring.
	half, rest := (limit+t.odd)/2, budget/2
	t.odd ^= 1
	fresh, err := o.candidates(ctx, tenant, t.seen, math.MaxInt64, min(half, page))
	if err != nil {
		return items, err
	}
	for _, c := range fresh {
		if len(items) >= half || budget <= rest {
			break
		}
		if err := serve(c, half, budget-rest); err != nil {
			return items, err
		}
		t.seen = c.backlog
	}
	// Then the ring, until the batch is full or it was passed from end to end in vain.
	budget = max(budget, 1)
	full := func() bool { return len(items) >= limit || budget <= 0 }
	for ends := 0; ends < 2 && !full(); {
		ring, err := o.candidates(ctx, tenant, t.at, t.end, min(limit, page))
		if err != nil {
			return items, err
		}
		for _, c := range ring {
			if full() {
				return items, nil
			}
			before := len(items)
			if err := serve(c, limit, budget); err != nil {
				return items, err
			}
			if len(items) > before {
				ends = 0
			}
			t.at, t.seen = c.backlog, max(t.seen, c.backlog)
		}
		if len(ring) < min(limit, page) {
			ends++
			t.at = 0
			if t.end, err = o.newest(ctx, tenant); err != nil {
				return items, err
			}
		}
	}
	return items, nil
}

func sizeOf(items []Item) (n int64) {
	for i := range items {
		n += size(&items[i].Record)
	}
	return n
}

// turn is the tenant's place. What is backlogged when a session meets the tenant is its ring; what comes later is new.
func (o *Outbox) turn(ctx context.Context, tenant string, after *Cursor) (*turn, error) {
	if after.branches == nil {
		after.branches = map[int64]position{}
	}
	if after.tenants == nil {
		after.tenants = map[string]*turn{}
	}
	if t := after.tenants[tenant]; t != nil {
		return t, nil
	}
	newest, err := o.newest(ctx, tenant)
	if err != nil {
		return nil, err
	}
	t := &turn{seen: newest, end: newest}
	after.tenants[tenant] = t
	return t, nil
}

const newestQuery = "SELECT COALESCE(max(backlog_id), 0) FROM branch WHERE tenant = ? AND shipped < exportable"

func (o *Outbox) newest(ctx context.Context, tenant string) (id int64, err error) {
	if err := o.store.Get(ctx, newestQuery, []any{tenant}, &id); err != nil {
		return 0, fmt.Errorf("find newest backlog of %s: %w", tenant, err)
	}
	return id, nil
}

const candidatesQuery = `SELECT b.id, b.gen, b.epoch, b.shipped, b.shipped_bytes, b.exportable, b.head_lsn, b.tail_id,
	b.backlog_id, COALESCE(b.hold_us, 0), r.name, b.ulid, b.parent, p.shipped, p.exportable
	FROM branch b JOIN run r ON r.id = b.run LEFT JOIN branch p ON p.id = b.parent
	WHERE b.tenant = ? AND b.shipped < b.exportable AND b.backlog_id > ? AND b.backlog_id <= ? ORDER BY b.backlog_id LIMIT ?`

func (o *Outbox) candidates(ctx context.Context, tenant string, after, upTo int64, limit int) ([]candidate, error) {
	rows, err := o.store.Query(ctx, candidatesQuery, tenant, after, upTo, limit)
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

const walkQuery = `WITH RECURSIVE walk (id, prev_id, lsn) AS (
	SELECT id, prev_id, lsn FROM outbox WHERE id = ?1
	UNION ALL SELECT o.id, o.prev_id, o.lsn FROM walk w JOIN outbox o ON o.id = w.prev_id WHERE w.lsn > ?2 + 1)
	SELECT o.lsn, o.step, o.kind, o.prevlsn, o.bytes, o.occurred_us, o.recorded_us, o.type, COALESCE(o.subject, ''),
		COALESCE(o.correlation, ''), COALESCE(o.causation, ''), COALESCE(o.trace, ''), COALESCE(o.topic, ''), COALESCE(o.retain, 0),
		COALESCE(o.to_node, ''), COALESCE(o.to_agent, ''), COALESCE(o.to_run, ''), COALESCE(o.input_id, ''), COALESCE(o.hops, 0),
		COALESCE(o.expires_us, 0), o.withheld_us IS NOT NULL, o.data
	FROM walk w JOIN outbox o ON o.id = w.id WHERE w.lsn <= ?3 AND (o.bytes <= ?4 OR w.lsn = ?2 + 1)`

// take reads one branch's next records: from the next mark (or the tail) down the chain, then turned round.
func (o *Outbox) take(ctx context.Context, tenant string, c candidate, after *Cursor, limit int, budget int64) ([]Item, error) {
	from := position{c.shipped, c.shippedBytes}
	if p, ok := after.branches[c.id]; ok && p.lsn > from.lsn {
		from = p
	}
	if from.lsn >= c.exportable || c.hold > o.store.SteadyUS() {
		return nil, nil
	}
	if c.parent.Valid && max(c.parentShipped.Int64, after.branches[c.parent.Int64].lsn) < c.parentExportable.Int64 {
		return nil, nil // the parent's kept prefix comes first
	}
	hi := from.lsn + int64(limit)
	if aligned := hi / stride * stride; hi >= c.exportable {
		hi = c.exportable
	} else if aligned > from.lsn {
		hi = aligned // where the next turn finds its start by the index
	}
	start := c.tail
	if mark := (hi + stride - 1) / stride * stride; mark <= c.head {
		err := o.store.Get(ctx, "SELECT id FROM outbox WHERE branch = ? AND lsn = ? AND lsn % 16 = 0", []any{c.id, mark}, &start)
		if err != nil {
			return nil, fmt.Errorf("find record %d of branch %s: %w", mark, c.ulid, err)
		}
	}
	rows, err := o.store.Query(ctx, walkQuery, start, from.lsn, hi, from.bytes+budget)
	if err != nil {
		return nil, fmt.Errorf("read branch %s after %d: %w", c.ulid, from.lsn, err)
	}
	defer rows.Close()
	var items []Item
	for rows.Next() {
		it := Item{Branch: c.id, Record: record.Record{Node: o.node, Key: record.BranchKey{Tenant: tenant, Run: c.run, Branch: c.ulid}, Gen: c.gen, Epoch: c.epoch}}
		if err := rows.Scan(&it.LSN, &it.Step, &it.Kind, &it.PrevLSN, &it.Bytes, &it.Occurred, &it.Recorded, &it.Type, &it.Subject,
			&it.Correlation, &it.Causation, &it.Trace, &it.Topic, &it.Retain, &it.ToNode, &it.ToAgent, &it.ToRun, &it.InputID, &it.Hops,
			&it.Expires, &it.Withheld, &it.Data); err != nil {
			return nil, fmt.Errorf("read branch %s after %d: %w", c.ulid, from.lsn, err)
		}
		if it.Expires != 0 {
			it.Expires = o.store.Wall(it.Expires)
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
