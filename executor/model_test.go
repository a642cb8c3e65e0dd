package executor

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"testing"

	"pgregory.net/rapid"

	"postrider/internal/agent"
	"postrider/internal/sqlite"
	"postrider/outbox"
)

// The model: runs, lines of history and inputs without a database, by the rules of rewind.
type (
	mRun struct {
		name     string
		live     *mLine
		lines    []*mLine
		claimed  *mInput // by a process that died, or by the present one
		attempts int64   // that ended the process
	}
	mLine struct {
		run                            *mRun
		parent                         *mLine
		fork                           int // step
		forkLSN, lsn, exported, marked int64
		steps                          []mStep // fork+1 and on
	}
	mStep struct {
		input string
		lsn   int64
	}
	mPlace struct {
		line *mLine
		step int
	}
	mInput struct {
		run                          *mRun
		id, command                  string
		timer                        bool // far off
		created, consumed, cancelled *mPlace
		script                       mScript
	}
	mScript struct {
		Events   int
		Commands []mCommand
		Cancel   []string
	}
	mCommand struct {
		ID    string
		To    int
		Timer bool
	}
	model struct {
		n      *node
		runs   []*mRun
		inputs []*mInput // in order of arrival
		seen   map[string]bool
		next   int
		prefix string
	}
)

func (s *mScript) json(m *model) string {
	var b strings.Builder
	b.WriteString(`{"events": [`)
	for i := range s.Events {
		fmt.Fprintf(&b, `%.*s{"type": "e"}`, min(i, 1), ",")
	}
	b.WriteString(`], "commands": [`)
	for i, c := range s.Commands {
		in := "0s"
		if c.Timer {
			in = "10h"
		}
		fmt.Fprintf(&b, `%.*s{"run": %q, "type": "t", "id": %q, "in": %q, "data": {}}`, min(i, 1), ",", m.runs[c.To].name, c.ID, in)
	}
	fmt.Fprintf(&b, `], "cancel": [%s]}`, strings.Join(s.Cancel, ","))
	return b.String()
}

// on says whether a place is on its run's live lineage.
func (p *mPlace) on() bool {
	upTo := 1 << 60
	for l := p.line.run.live; l != nil; l = l.parent {
		if l == p.line {
			return p.step <= upTo
		}
		upTo = l.fork
	}
	return false
}

// steps lists the live lineage, from step 1.
func (r *mRun) steps() (list []mStep) {
	upTo := 1 << 60
	for l := r.live; l != nil; l = l.parent {
		own := l.steps[:min(len(l.steps), upTo-l.fork)]
		list = append(slices.Clone(own), list...)
		upTo = min(upTo, l.fork)
	}
	return list
}

func (in *mInput) pending() bool { return in.consumed == nil && in.cancelled == nil }

func (m *model) pending(r *mRun) (list []*mInput) {
	for _, in := range m.inputs {
		if in.run == r && in.pending() && !in.timer {
			list = append(list, in)
		}
	}
	for _, in := range m.inputs { // they are due last
		if in.run == r && in.pending() && in.timer {
			list = append(list, in)
		}
	}
	return list
}

// letGo frees a run from an input that it had in hand.
func (r *mRun) letGo(in *mInput) {
	if r.claimed == in {
		r.claimed, r.attempts = nil, 0
	}
}

func (m *model) step(r *mRun) {
	list := m.pending(r)
	if len(list) == 0 || list[0].timer {
		return
	}
	in, l := list[0], r.live
	at := &mPlace{l, l.fork + len(l.steps) + 1}
	in.consumed = at
	r.letGo(r.claimed)
	for _, id := range in.script.Cancel {
		for _, other := range m.inputs {
			if other.pending() && other.created != nil && other.created.line.run == r && fmt.Sprintf("%q", other.command) == id {
				other.cancelled = at
				other.run.letGo(other)
				delete(m.seen, other.run.name+" "+other.id) // it may be set anew
			}
		}
	}
	for i, c := range in.script.Commands {
		to := m.runs[c.To]
		cmd := &mInput{run: to, command: c.ID, timer: c.Timer, created: at}
		if c.ID != "" {
			cmd.id = "pr:n1/d/" + r.name + "/" + c.ID
			if m.seen[to.name+" "+cmd.id] {
				continue
			}
			m.seen[to.name+" "+cmd.id] = true
		} else {
			cmd.id = fmt.Sprintf("/%d/%d", at.step, i) // with the branch before it
		}
		m.inputs = append(m.inputs, cmd)
	}
	l.lsn += int64(in.script.Events)
	l.exported = l.lsn
	l.steps = append(l.steps, mStep{in.id, l.lsn})
}

func (m *model) rewind(t *rapid.T, r *mRun, to int) {
	old := map[*mLine]int{} // up to which step it was live
	upTo := 1 << 60
	for l := r.live; l != nil; l = l.parent {
		old[l] = min(upTo, l.fork+len(l.steps))
		upTo = l.fork
	}
	holder := r.live
	for holder.parent != nil && to <= holder.fork {
		holder.exported = min(holder.exported, holder.forkLSN)
		holder = holder.parent
	}
	lsn := int64(1)
	if to > holder.fork {
		lsn = holder.steps[to-holder.fork-1].lsn
	}
	holder.exported = lsn
	r.live = &mLine{run: r, parent: holder, fork: to, forkLSN: lsn, lsn: lsn + 1, exported: lsn + 1, marked: lsn}
	r.lines = append(r.lines, r.live)

	abandoned := func(p *mPlace) bool { upTo, was := old[p.line]; return was && p.step <= upTo && p.step > to }
	kept := m.inputs[:0]
	for _, in := range m.inputs {
		if in.created != nil && abandoned(in.created) && !(in.consumed != nil && in.consumed.on()) {
			delete(m.seen, in.run.name+" "+in.id)
			if in.consumed == nil {
				in.run.letGo(in)
				continue
			}
		}
		kept = append(kept, in)
	}
	m.inputs = kept
	for _, in := range m.inputs {
		if in.created == nil || in.created.line.run != r || !in.created.on() {
			continue
		}
		if in.consumed != nil && abandoned(in.consumed) {
			in.consumed = nil
		}
		if in.cancelled != nil && abandoned(in.cancelled) {
			in.cancelled = nil
			if in.command != "" {
				m.seen[in.run.name+" "+in.id] = true
			}
		}
	}
	r.letGo(r.claimed)
}

func (m *model) check(t *rapid.T) {
	for _, r := range m.runs {
		d := m.n.show(r.name)
		steps := r.steps()
		want := "null"
		if len(steps) > 0 {
			want = fmt.Sprint(len(steps))
		}
		if string(d.State) != want || d.LSN != r.live.lsn || int(d.Step) != len(steps) || int(d.Gen) != len(r.lines) {
			t.Fatalf("run %s: state %s, LSN %d, step %d, gen %d; want state %s, LSN %d, step %d, gen %d",
				r.name, d.State, d.LSN, d.Step, d.Gen, want, r.live.lsn, len(steps), len(r.lines))
		}
		if d.Attempts != r.attempts {
			t.Fatalf("run %s: %d attempts, want %d", r.name, d.Attempts, r.attempts)
		}
		has := m.n.stepInputs(r.name)
		if !slices.EqualFunc(has, steps, func(id string, s mStep) bool { return strings.HasSuffix(id, s.input) }) {
			t.Fatalf("run %s: inputs of the steps %v, want %v", r.name, has, steps)
		}
		if got := len(m.n.exported(r.name)); got != int(r.live.lsn) {
			t.Fatalf("run %s: %d records on the live lineage, want %d", r.name, got, r.live.lsn)
		}
		pending := strings.Split(m.n.value(`SELECT group_concat(input_id, ' ') FROM (SELECT input_id FROM inbox JOIN run r ON r.id = run WHERE r.name = ?
			AND consumed_branch IS NULL AND cancelled_branch IS NULL AND ended_us IS NULL ORDER BY due_us, inbox.id)`, r.name), " ")
		if pending[0] == "" {
			pending = nil
		}
		if list := m.pending(r); !slices.EqualFunc(pending, list, func(id string, in *mInput) bool { return strings.HasSuffix(id, in.id) }) {
			var ids []string
			for _, in := range list {
				ids = append(ids, in.id)
			}
			t.Fatalf("run %s: pending inputs %v, want %v", r.name, pending, ids)
		}
		for i, b := range d.Branches {
			l := r.lines[i]
			export := m.n.value("SELECT exportable FROM branch WHERE ulid = ?", b.Branch)
			if export != fmt.Sprint(l.exported) || b.Shipped != l.marked || b.LSN != l.lsn || b.ForkLSN != l.forkLSN || int(b.ForkStep) != l.fork || b.Live != (l == r.live) {
				t.Fatalf("run %s, branch %d: %+v, exportable %s; want %+v", r.name, i+1, b, export, l)
			}
		}
	}
}

// ship drains everything as a new session does and acknowledges some of it.
func (m *model) ship(t *rapid.T, acked bool) {
	box := outbox.New(m.n.store, "n1")
	fence, err := box.Lease(context.Background(), "test")
	if err != nil {
		t.Fatal(err)
	}
	var cursor outbox.Cursor
	var items []outbox.Item
	for {
		more, err := box.Drain(context.Background(), "", &cursor, 100)
		if err != nil {
			t.Fatal(err)
		}
		if len(more) == 0 {
			break
		}
		items = append(items, more...)
	}
	want := int64(0)
	for _, r := range m.runs {
		for _, l := range r.lines {
			want += max(0, l.exported-l.marked)
		}
	}
	if int(want) != len(items) {
		t.Fatalf("%d records are pending, want %d", len(items), want)
	}
	if !acked || len(items) == 0 {
		return
	}
	var marks []outbox.Shipped
	for _, it := range items[:rapid.IntRange(1, len(items)).Draw(t, "acknowledged")] {
		marks = append(marks, outbox.Shipped{Branch: it.Branch, LSN: it.LSN, Bytes: it.Bytes, Recorded: it.Recorded})
		for _, r := range m.runs {
			if r.name == it.Key.Run {
				r.lines[it.Gen-1].marked = it.LSN
			}
		}
	}
	if err := box.Ack(context.Background(), fence, marks); err != nil {
		t.Fatal(err)
	}
}

// Whatever is sent, decided, crashed, shipped and rewound: states, inputs and exported lineages are those of the model.
func TestExecutorAgreesWithItsModel(t *testing.T) {
	agents := one(agent.Func(scripted))
	o := quick
	o.MaxAttempts = 1e6 // ends of the process pause no run
	n := newNode(t, agents, o)
	n.ending.Store(true) // one step at a time
	cases := 0
	rapid.Check(t, func(t1 *rapid.T) {
		n.t = t1
		// One database for all cases, in which each has runs of its own.
		cases++
		m := &model{n: n, seen: map[string]bool{}, prefix: fmt.Sprintf("c%d-", cases)}
		n.exec("UPDATE branch SET shipped = max(shipped, exportable), shipped_bytes = max(shipped_bytes, export_bytes)")
		n.exec("UPDATE run SET status = 'failed' WHERE status <> 'failed'")
		for i := range 3 {
			r := &mRun{name: fmt.Sprintf("%sr%d", m.prefix, i)}
			r.live = &mLine{run: r, lsn: 1, exported: 1}
			r.lines = []*mLine{r.live}
			m.runs = append(m.runs, r)
			n.send("a", r.name, "first", "{}")
			m.inputs = append(m.inputs, &mInput{run: r, id: "first"})
		}
		run := func(t *rapid.T) *mRun { return m.runs[rapid.IntRange(0, 2).Draw(t, "run")] }
		take := func(r *mRun) {
			id, err := runByName(n, r.name)
			if err != nil {
				t1.Fatal(err)
			}
			n.work(context.Background(), id, &worker{pool: &pool{}})
			m.step(r)
		}
		crash := func() {
			n.restart(t, agents, o)
			n.ending.Store(true)
		}
		t1.Repeat(map[string]func(*rapid.T){
			"send": func(t *rapid.T) {
				r := run(t)
				var s mScript
				s.Events = rapid.IntRange(0, 3).Draw(t, "events")
				for range rapid.IntRange(0, 3).Draw(t, "commands") {
					s.Commands = append(s.Commands, mCommand{
						ID: rapid.SampledFrom([]string{"", "c0", "c1", "c2"}).Draw(t, "command"), To: rapid.IntRange(0, 2).Draw(t, "to"), Timer: rapid.Bool().Draw(t, "timer")})
				}
				s.Cancel = rapid.SliceOfN(rapid.SampledFrom([]string{`"c0"`, `"c1"`, `"c2"`}), 0, 2).Draw(t, "cancel")
				m.next++
				in := &mInput{run: r, id: fmt.Sprint("i", m.next), script: s}
				if out := n.send("a", r.name, in.id, s.json(m)); out.Duplicate {
					t.Fatalf("%s is called a duplicate", in.id)
				}
				m.inputs = append(m.inputs, in)
				if out := n.send("a", r.name, in.id, s.json(m)); !out.Duplicate {
					t.Fatalf("%s is not called a duplicate", in.id)
				}
			},
			"step":  func(t *rapid.T) { take(run(t)) },
			"steps": func(t *rapid.T) { r := run(t); take(r); take(r); take(r) },
			"crash": func(*rapid.T) { crash() },
			"crash in steps": func(t *rapid.T) {
				boot := rapid.SampledFrom([]string{n.boot, n.boot, "before"}).Draw(t, "boot")
				var inHand []*mRun
				alone := false // the last one in hand
				for _, r := range m.runs[:rapid.IntRange(1, 3).Draw(t, "in hand")] {
					h := hand{rapid.Bool().Draw(t, "alone"), boot}
					id, err := runByName(n, r.name)
					if err != nil {
						t.Fatal(err)
					}
					n.write(func(ctx context.Context, tx *sqlite.Tx) error {
						_, err := claimStep(ctx, tx, id, n.hosted, h)
						return err
					})
					if list := m.pending(r); len(list) > 0 && !list[0].timer {
						r.claimed = list[0]
						inHand, alone = append(inHand, r), h.alone
					}
				}
				if len(inHand) == 1 && alone && boot == n.boot {
					inHand[0].attempts++
				}
				crash()
			},
			"ship":     func(t *rapid.T) { m.ship(t, true) },
			"lose ack": func(t *rapid.T) { m.ship(t, false) },
			"rewind": func(t *rapid.T) {
				r := run(t)
				to := rapid.IntRange(0, len(r.steps())).Draw(t, "to")
				n.rewind(r.name, int64(to))
				m.rewind(t, r, to)
			},
			"": m.check,
		})
	})
}
