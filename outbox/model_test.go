package outbox

import (
	"fmt"
	"maps"
	"slices"
	"testing"

	"pgregory.net/rapid"

	"postrider/internal/record"
)

// line is a branch as the model knows it.
type line struct {
	id      int64
	tenant  string
	parent  *line
	fork    int64
	head    int64
	export  int64
	shipped int64
	out     int64    // handed out in this session up to
	data    []string // from fork+1
}

func (l *line) from() int64 { return max(l.shipped, l.out) }

// due says whether Drain owes records of this line.
func (l *line) due() bool {
	return l.from() < l.export && (l.parent == nil || l.parent.from() >= l.parent.export)
}

// model is the outbox without a database.
type model struct {
	b      *box
	lines  map[int64]*line
	live   []*line // of each run
	cursor *Cursor
	fence  int64
	next   int
	out    []Item // handed out and not acknowledged, in order
}

func (m *model) init(t *rapid.T, b *box) {
	m.b, m.lines = b, map[int64]*line{}
	b.t = t
	for i := range 4 {
		tenant := fmt.Sprintf("t%d", i%2)
		l := &line{id: b.root(tenant), tenant: tenant}
		m.lines[l.id] = l
		m.live = append(m.live, l)
	}
	m.restart()
}

func (m *model) restart() {
	m.cursor, m.out, m.fence = new(Cursor), nil, m.b.lease()
	for _, l := range m.lines {
		l.out = 0
	}
}

func (m *model) add(t *rapid.T, l *line, n int) {
	records := make([]record.Record, n)
	for i := range records {
		m.next++
		data := fmt.Sprint(m.next)
		l.data = append(l.data, data)
		if rapid.Bool().Draw(t, "message") {
			records[i] = message("a/" + data)
			records[i].Data = []byte(data)
		} else {
			records[i] = event(data)
		}
	}
	m.b.add(l.id, records...)
	l.head += int64(n)
	l.export = l.head
}

// rewind forks a run at some LSN of its live lineage. A branch is no parent at its own fork.
func (m *model) rewind(t *rapid.T) {
	run := rapid.IntRange(0, len(m.live)-1).Draw(t, "run")
	top := m.live[run].head
	var below []int64
	for l := m.live[run]; l != nil; l = l.parent {
		if top <= l.fork || rapid.Bool().Draw(t, "deeper") && l.parent != nil && l.parent.parent != nil {
			below, top = append(below, l.id), l.fork
			continue
		}
		at := rapid.Int64Range(l.fork+1, top).Draw(t, "lsn")
		child := &line{id: m.b.rewind(l.id, at, below...), tenant: l.tenant, parent: l, fork: at, head: at + 1, export: at + 1, shipped: at,
			data: []string{"null"}}
		l.export = at
		for _, id := range below {
			m.lines[id].export = m.lines[id].fork
		}
		m.lines[child.id] = child
		m.live[run] = child
		return
	}
}

func (m *model) drain(t *rapid.T, limit int) {
	items := m.b.drain(m.cursor, limit)
	for _, it := range items {
		l := m.lines[it.Branch]
		if !l.due() {
			t.Fatalf("record %d of branch %d: handed out up to %d of %d, or its parent is not complete", it.LSN, it.Branch, l.from(), l.export)
		}
		if want := l.from() + 1; it.LSN != want {
			t.Fatalf("record %d of branch %d, want %d", it.LSN, it.Branch, want)
		}
		if want := l.data[it.LSN-l.fork-1]; string(it.Data) != want {
			t.Fatalf("record %d of branch %d holds %s, want %s", it.LSN, it.Branch, it.Data, want)
		}
		if it.Key.Tenant != l.tenant {
			t.Fatalf("record of tenant %s, want %s", it.Key.Tenant, l.tenant)
		}
		l.out = it.LSN
	}
	m.out = append(m.out, items...)
	if len(items) < limit {
		for _, l := range m.lines {
			if l.due() {
				t.Fatalf("%d of %d records, but branch %d has %d to %d pending", len(items), limit, l.id, l.from()+1, l.export)
			}
		}
	}
}

// ack acknowledges the first n records that are out, as a relay does: one mark per branch.
func (m *model) ack(t *rapid.T, n int) {
	marks := map[int64]Shipped{}
	for _, it := range m.out[:n] {
		marks[it.Branch] = shippedUpTo(it)
	}
	m.out = m.out[n:]
	if err := m.b.Ack(t.Context(), m.fence, slices.Collect(maps.Values(marks))); err != nil {
		t.Fatal(err)
	}
	for id, s := range marks {
		m.lines[id].shipped = max(m.lines[id].shipped, s.LSN)
		m.cursor.Settle(id, s.LSN)
		if l := m.lines[id]; l.out <= s.LSN {
			l.out = 0
		}
	}
}

// check compares the figures with a count of all records.
func (m *model) check(t *rapid.T) {
	var want Stats
	rows, err := m.b.store.Reader().QueryContext(t.Context(), `SELECT s.state, s.recorded_us, length(o.data) + length(o.type) + COALESCE(length(o.topic), 0)
		FROM record_state s JOIN outbox o ON o.id = s.id`)
	if err != nil {
		t.Fatal(err)
	}
	defer rows.Close()
	for rows.Next() {
		var state string
		var at, bytes int64
		if err := rows.Scan(&state, &at, &bytes); err != nil {
			t.Fatal(err)
		}
		switch state {
		case "pending":
			want.Pending++
			want.PendingBytes += bytes
			if want.OldestUS == 0 || at < want.OldestUS {
				want.OldestUS = at
			}
		case "shipped":
			want.Shipped++
		case "withheld":
			want.Withheld++
		default:
			t.Fatalf("state %q", state)
		}
	}
	if err := rows.Err(); err != nil {
		t.Fatal(err)
	}
	got, err := m.b.Stats(t.Context(), "")
	if err != nil {
		t.Fatal(err)
	}
	if got != want {
		t.Fatalf("stats %+v, want %+v", got, want)
	}
	var model Stats
	for _, l := range m.lines {
		model.Pending += max(0, l.export-l.shipped)
		model.Shipped += l.shipped - l.fork
		model.Withheld += l.head - max(l.export, l.shipped)
	}
	if got.Pending != model.Pending || got.Shipped != model.Shipped || got.Withheld != model.Withheld {
		t.Fatalf("stats %+v, the model has %+v", got, model)
	}
}

// Whatever is appended, rewound, drained, returned, acknowledged or lost with its session: each record that may be
// exported is handed out once a session, in order, and in the end all of them are shipped and no other.
func TestOutboxAgreesWithItsModel(t *testing.T) {
	b := newBox(t)
	rapid.Check(t, func(t *rapid.T) {
		// One database for all cases: opening one takes longer than a case. What the last case left is shipped.
		b.t = t
		if b.n > 0 {
			b.exec("UPDATE branch SET shipped = max(shipped, exportable), shipped_bytes = max(shipped_bytes, export_bytes)")
			b.exec("DELETE FROM outbox")
			b.exec("UPDATE branch SET fork_lsn = 0, shipped = 0, exportable = 0, head_lsn = 0")
		}
		m := &model{}
		m.init(t, b)
		t.Repeat(map[string]func(*rapid.T){
			"add": func(t *rapid.T) {
				l := m.live[rapid.IntRange(0, len(m.live)-1).Draw(t, "run")]
				m.add(t, l, rapid.IntRange(1, 40).Draw(t, "records"))
			},
			"rewind": func(t *rapid.T) { m.rewind(t) },
			"drain":  func(t *rapid.T) { m.drain(t, rapid.SampledFrom([]int{1, 7, 64, 1000}).Draw(t, "limit")) },
			"ack": func(t *rapid.T) {
				if len(m.out) == 0 {
					t.Skip()
				}
				m.ack(t, rapid.IntRange(1, len(m.out)).Draw(t, "records"))
			},
			"return": func(t *rapid.T) {
				if len(m.out) == 0 {
					t.Skip()
				}
				n := rapid.IntRange(0, len(m.out)-1).Draw(t, "sent")
				m.cursor.Return(m.out[n:])
				for _, it := range slices.Backward(m.out[n:]) {
					m.lines[it.Branch].out = it.LSN - 1
				}
				m.out = m.out[:n]
			},
			"restart": func(t *rapid.T) { m.restart() },
			"":        m.check,
		})
		m.restart()
		for before := -1; before != len(m.out); {
			before = len(m.out)
			m.drain(t, 64)
		}
		if len(m.out) > 0 {
			m.ack(t, len(m.out))
		}
		for _, l := range m.lines {
			if l.shipped < l.export {
				t.Fatalf("branch %d is shipped up to %d of %d", l.id, l.shipped, l.export)
			}
		}
		m.check(t)
	})
}
