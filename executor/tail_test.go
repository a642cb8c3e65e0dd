package executor

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	"postrider/internal/agent"
	"postrider/internal/sqlite"
)

func (e Event) String() string {
	switch e.Kind {
	case "rewind":
		return fmt.Sprintf("rewind %s to %d", e.Branch, e.Step)
	case "dead":
		return "dead " + e.Input
	}
	return fmt.Sprintf("step %s %d", e.Branch, e.Step)
}

// tail looks until nothing is left.
func (n *node) tail(store *sqlite.Store, run string, at *TailCursor, limit int) (list []string) {
	n.t.Helper()
	for {
		t, err := Tail(context.Background(), store, "d", run, at, limit, false)
		if err != nil {
			n.t.Fatalf("tail: %v", err)
		}
		if len(t.Events) > 2*limit {
			n.t.Fatalf("%d events with limit %d", len(t.Events), limit)
		}
		for _, e := range t.Events {
			list = append(list, e.String())
		}
		if !t.More {
			return list
		}
	}
}

// Tails that look at different times, with different limits, all see the same history, each event once, in order. What was
// set aside has no place in the order of steps.
func TestTailGivesEachEventOnceAcrossRewinds(t *testing.T) {
	n := newNode(t, one(scripted), quick)
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	r := rand.New(rand.NewPCG(seed, 1))
	n.send("a", "r", "", "{}")
	n.settle()
	type tail struct {
		TailCursor
		limit int
		seen  []string
	}
	tails := []*tail{{limit: 1}, {limit: 3}, {limit: 16}, {limit: 1000}, {limit: 2}}
	var history []string
	step := func() { d := n.show("r"); history = append(history, fmt.Sprintf("step %s %d", d.Branch, d.Step)) }
	step()
	dead := 0
	for range 40 {
		switch k := r.IntN(10); {
		case k < 2:
			to := r.Int64N(n.show("r").Step + 1)
			out := n.rewind("r", to)
			history = append(history, fmt.Sprintf("rewind %s to %d", out.Branch, to))
		case k < 3:
			n.send("a", "r", "", `{"unknown": 1}`) // terminal
			n.settle()
			dead++
		default:
			for range 1 + r.IntN(10) {
				n.send("a", "r", "", "{}")
				n.settle()
				step()
			}
		}
		for _, tl := range tails[:4] { // the last looks once, at the end
			if r.IntN(2) == 0 {
				tl.seen = append(tl.seen, n.tail(n.store, "r", &tl.TailCursor, tl.limit)...)
			}
		}
	}
	for _, tl := range tails {
		tl.seen = append(tl.seen, n.tail(n.store, "r", &tl.TailCursor, tl.limit)...)
		var live, set []string
		for _, e := range tl.seen {
			if strings.HasPrefix(e, "dead") {
				set = append(set, e)
			} else {
				live = append(live, e)
			}
		}
		if !slices.Equal(live, history) {
			t.Errorf("limit %d saw\n\t%q, want\n\t%q", tl.limit, live, history)
		}
		slices.Sort(set)
		if len(set) != dead || len(slices.Compact(set)) != dead {
			t.Errorf("limit %d saw %d inputs set aside of %d: %q", tl.limit, len(set), dead, set)
		}
	}
	for last := range len(history) + 3 {
		at, err := TailFrom(t.Context(), n.store, "d", "r", last)
		if err != nil {
			t.Fatal(err)
		}
		got := slices.DeleteFunc(n.tail(n.store, "r", &at, 50), func(e string) bool { return strings.HasPrefix(e, "dead") })
		if want := history[max(0, len(history)-last):]; !slices.Equal(got, want) {
			t.Errorf("the last %d are %q, want %q", last, got, want)
		}
	}
}

// Another process follows a node that works, while a third one rewinds.
func TestTailFollowsARunningNode(t *testing.T) {
	n := newNode(t, one(scripted), quick)
	reader, err := sqlite.Open(t.Context(), n.path, sqlite.NodeSchema(schemaText(), "", n.path), sqlite.Options{ReadOnly: true})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { reader.Close() })
	other := n.second(t)
	n.send("a", "r", "first", "{}")
	n.start(t)
	ended := make(chan error, 1)
	go func() {
		for i := range 160 {
			if _, err := Submit(t.Context(), other, Input{Tenant: "d", Agent: "a", Run: "r", ID: fmt.Sprint(i), Type: "t", Data: []byte("{}")}); err != nil {
				ended <- err
				return
			}
			if i%20 == 19 {
				d, err := Show(t.Context(), other, "d", "r")
				if err == nil {
					_, err = Rewind(t.Context(), other, "d", "r", min(d.Step, int64(i/40)), "")
				}
				if err != nil {
					ended <- err
					return
				}
			}
		}
		ended <- nil
	}()
	var at TailCursor
	var seen []string
	for done := false; !done; {
		select {
		case err := <-ended:
			if err != nil {
				t.Fatal(err)
			}
			eventually(t, "the run rests", func() bool { return n.show("r").Status == "idle" })
			done = true
		default:
		}
		seen = append(seen, n.tail(reader, "r", &at, 7)...)
	}
	var want []string
	d := n.show("r")
	for _, b := range d.Branches {
		if b.Parent != "" {
			want = append(want, fmt.Sprintf("rewind %s to %d", b.Branch, b.ForkStep))
		}
		for s := b.ForkStep + 1; s <= b.Step; s++ {
			want = append(want, fmt.Sprintf("step %s %d", b.Branch, s))
		}
	}
	if len(d.Branches) != 9 || !slices.Equal(seen, want) {
		t.Errorf("saw %d events\n\t%q, want %d\n\t%q", len(seen), seen, len(want), want)
	}
}

func TestTailTellsHowTheRunStands(t *testing.T) {
	n := newNode(t, one(scripted), Options{BackoffMin: time.Hour, BackoffMax: time.Hour, MaxAttempts: 2})
	n.send("a", "r", "in1", `{"state": {"a": "<1>" }, "commands": [{"type": "tick", "in": "1h"}]}`)
	n.settle()
	var at TailCursor
	got, err := Tail(t.Context(), n.store, "d", "r", &at, 10, true)
	if err != nil {
		t.Fatal(err)
	}
	e := got.Events[0]
	if len(got.Events) != 1 || e.Input != "in1" || e.InputType != "t" || e.Next != "wait" || e.LSN != 1 && e.LSN != 2 || e.AtUS < e.StartedUS ||
		string(e.State) != `{"a": "<1>" }` || !strings.HasPrefix(string(e.Data), `{"state"`) {
		t.Errorf("%+v, state %s, data %s", e, e.State, e.Data)
	}
	if got.Status != "waiting" || got.WakeUS == 0 || got.LastError != "" || got.Step != 1 || got.More {
		t.Errorf("%+v", got)
	}
	for _, err := range []error{func() error { _, err := Tail(t.Context(), n.store, "d", "s", &at, 1, false); return err }(),
		func() error { _, err := TailFrom(t.Context(), n.store, "e", "r", 1); return err }()} {
		if !errors.Is(err, ErrNotFound) {
			t.Errorf("no run: %v", err)
		}
	}
}

// A look costs what is new, not what there is.
func TestTailScansNoTable(t *testing.T) {
	n := newNode(t, one(scripted), quick)
	for name, query := range map[string]string{"steps": tailQuery, "branches": tailBranchesQuery, "newest branches": newestBranchesQuery} {
		args := []any{1, 1, 1}
		if name == "steps" {
			args = append(args, 1)
		}
		rows, err := n.store.Reader().QueryContext(t.Context(), "EXPLAIN QUERY PLAN "+query, args...)
		if err != nil {
			t.Fatal(err)
		}
		defer rows.Close()
		for rows.Next() {
			var id, parent, unused int64
			var step string
			if err := rows.Scan(&id, &parent, &unused, &step); err != nil {
				t.Fatal(err)
			}
			if scan, ok := strings.CutPrefix(step, "SCAN "); ok && scan != "w" || strings.Contains(step, "TEMP B-TREE") { // w is a CTE
				t.Errorf("%s: %s", name, step)
			}
		}
	}
}

func TestNamesForCompletion(t *testing.T) {
	n := newNode(t, map[string]agent.Agent{"a": agent.Func(scripted), "b": agent.Func(scripted)}, quick)
	for _, run := range []string{"r-1", "r-2", "s", "R"} {
		n.send("a", run, "", "{}")
	}
	n.send("b", "r-9", "", "{}")
	for _, c := range []struct {
		agent, prefix string
		limit         int
		want          string
	}{
		{"", "", 100, "[R r-1 r-2 r-9 s]"}, {"", "r", 100, "[r-1 r-2 r-9]"}, {"b", "r", 100, "[r-9]"}, {"", "r-1", 100, "[r-1]"}, {"", "", 2, "[R r-1]"}, {"c", "", 9, "[]"},
	} {
		if got, err := RunNames(t.Context(), n.store, "d", c.agent, c.prefix, c.limit); err != nil || fmt.Sprint(got) != c.want {
			t.Errorf("%+v: %v, %v", c, got, err)
		}
	}
	if got, err := AgentNames(t.Context(), n.store, "", 10); err != nil || fmt.Sprint(got) != "[a b]" {
		t.Errorf("agents %v, %v", got, err)
	}
}
