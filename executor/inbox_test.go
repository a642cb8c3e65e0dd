package executor

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"postrider/internal/agent"
	"postrider/internal/record"
)

// everyState brings a node to where there is an input in every state, and returns their ids by state.
func everyState(t *testing.T) (*node, map[string]string) {
	t.Helper()
	m := moody{"dead": agent.Terminal, "stuck": agent.Retryable}
	n := newNode(t, map[string]agent.Agent{"a": m, "gone": agent.Func(scripted)}, quick)
	n.send("gone", "g", "first", "{}")
	n.send("a", "r", "first", `{"commands": [{"type": "t", "in": "1h", "id": "c", "data": {}}, {"run": "w", "type": "t", "id": "w", "data": {"commands": []}}]}`)
	n.settle()
	n.send("a", "r", "dead", "{}")
	n.send("a", "r", "cancels", `{"cancel": ["c"]}`)
	n.send("a", "r", "given-up", "{}")
	n.drop(n.row("r", "given-up"))
	n.send("a", "p", "stuck", "{}")
	n.send("a", "p", "behind", "{}")
	n.settle()
	o := quick
	o.Routes = map[string]Route{"far": {Node: "n2"}}
	n.restart(t, map[string]agent.Agent{"a": m}, o)
	n.send("gone", "g", "unhosted", "{}")
	n.settle()
	if _, err := n.trySend("far", "f", "handed", "{}"); err != nil {
		t.Fatal(err)
	}
	if _, err := n.passOn(t.Context()); err != nil {
		t.Fatal(err)
	}
	if _, err := n.trySend("far", "f", "elsewhere", "{}"); err != nil {
		t.Fatal(err)
	}
	if _, err := n.trySend("far@n3", "f", "addressed", "{}"); err != nil {
		t.Fatal(err)
	}
	if _, err := Submit(t.Context(), n.store, Input{Tenant: "d", Agent: "a", Run: "r", ID: "timer", Type: "t", Data: []byte("{}"), In: time.Hour}); err != nil {
		t.Fatal(err)
	}
	n.send("a", "r", "running", "{}") // stored after the timer, due before it
	n.inHand(t)
	return n, map[string]string{"first": InputConsumed, "cancels": InputConsumed, idPrefix + "n1/d/r/c": InputCancelled, "dead": InputDead, "given-up": InputDropped,
		"stuck": InputPaused, "behind": InputPending, "unhosted": InputUnhosted, "handed": InputHanded, "elsewhere": InputElsewhere, "addressed": InputElsewhere,
		"running": InputRunning, "timer": InputWaiting, idPrefix + "n1/d/r/w": InputConsumed}
}

func TestInputsSaysWhereEachIsAndWhy(t *testing.T) {
	n, want := everyState(t)
	got, why := map[string]string{}, map[string]string{}
	for _, run := range []string{"r", "p", "g", "f", "w"} {
		list, _, err := Inputs(t.Context(), n.store, InputFilter{Run: run, States: InputStates, Limit: 100})
		if err != nil {
			t.Fatal(err)
		}
		for _, in := range list {
			if in.Run != run || in.Data != nil {
				t.Errorf("run %s has %+v", run, in)
			}
			got[in.ID], why[in.ID] = in.State, in.Reason+in.LastError
		}
	}
	for id, state := range want {
		if got[id] != state {
			t.Errorf("%s is %q, want %s", id, got[id], state)
		}
		in, err := FindInput(t.Context(), n.store, "d", map[string]string{"stuck": "p", "behind": "p", "unhosted": "g", "handed": "f", "elsewhere": "f", "addressed": "f",
			idPrefix + "n1/d/r/w": "w"}[id]+map[bool]string{true: "r"}[n.value("SELECT run_name FROM inbox WHERE input_id = ?", id) == "r" || id == "first"], id)
		if err != nil || in.State != state || in.Data == nil {
			t.Errorf("find %s: %+v, %v", id, in, err)
		}
	}
	for id, want := range map[string]string{"dead": "no dead", "stuck": "no stuck", "behind": fmt.Sprintf("paused at input %d", n.row("p", "stuck")), "unhosted": "agent gone is not hosted here",
		"handed": "to node n2", "elsewhere": "goes to node n2", "addressed": "goes to node n3", "given-up": "by an operator"} {
		if !strings.Contains(why[id], want) {
			t.Errorf("%s: %q, want %q", id, why[id], want)
		}
	}

	// What is not over, in order of due time, in pages, over all runs.
	var live []string
	for id, state := range want {
		if slices.Contains(InputStates[:LiveStates], state) {
			live = append(live, id)
		}
	}
	for _, size := range []int{1, 3, 100} {
		var ids []string
		var due int64
		f := InputFilter{Tenant: "d", States: InputStates[:LiveStates], Limit: size, Data: true}
		for more := true; more; {
			var page []InputInfo
			var err error
			if page, more, err = Inputs(t.Context(), n.store, f); err != nil {
				t.Fatal(err)
			}
			for _, in := range page {
				if in.DueUS < due || string(in.Data) != "{}" {
					t.Errorf("%+v behind %d", in, due)
				}
				ids, due, f.After = append(ids, in.ID), in.DueUS, in.Row
			}
		}
		if ids[len(ids)-1] != "timer" {
			t.Errorf("last of %v", ids)
		}
		slices.Sort(ids)
		if slices.Sort(live); !slices.Equal(ids, live) {
			t.Errorf("in pages of %d: %v, want %v", size, ids, live)
		}
	}
	for name, c := range map[string]struct {
		f    InputFilter
		want string
	}{
		"tenant": {InputFilter{Tenant: "e", States: InputStates[:LiveStates]}, ""},
		"agent":  {InputFilter{Agent: "far", States: InputStates[:LiveStates]}, "elsewhere addressed"},
		"state":  {InputFilter{States: []string{InputDead, InputDropped}}, "dead given-up"},
		"both":   {InputFilter{Run: "f", Agent: "a", States: InputStates}, ""},
	} {
		c.f.Limit = 10
		list, _, err := Inputs(t.Context(), n.store, c.f)
		var ids []string
		for _, in := range list {
			ids = append(ids, in.ID)
		}
		if got := strings.Join(ids, " "); err != nil || got != c.want {
			t.Errorf("%s: %s, %v, want %s", name, got, err, c.want)
		}
	}
	if _, _, err := Inputs(t.Context(), n.store, InputFilter{States: InputStates, Limit: 1}); !errors.Is(err, ErrInvalid) {
		t.Errorf("consumed of all runs: %v", err)
	}
	if _, _, err := Inputs(t.Context(), n.store, InputFilter{States: InputStates[:1], Limit: 1, After: 1 << 40}); !errors.Is(err, ErrNotFound) {
		t.Errorf("after nothing: %v", err)
	}
}

// What is over is no part of what is read to list, count or find what is not, however much it is, nor is what was handed
// over part of what is read for dead letters. A scan is one of an index that holds nothing but what is asked for.
func TestInputsScansNoTable(t *testing.T) {
	n := newNode(t, one(scripted), quick)
	const sorted = "sorted"
	explain := func(what string, may []string, query string, args ...any) {
		t.Helper()
		rows, err := n.store.Reader().Query("EXPLAIN QUERY PLAN "+query, args...)
		if err != nil {
			t.Fatalf("%s: %v", what, err)
		}
		defer rows.Close()
		steps := 0
		for rows.Next() {
			var id, parent, notUsed int64
			var detail string
			if err := rows.Scan(&id, &parent, &notUsed, &detail); err != nil {
				t.Fatal(err)
			}
			steps++
			words := strings.Fields(detail)
			if words[0] == "SCAN" && slices.Contains([]string{"i", "c", "o", "w", "b", "r", "inbox", "seen", "run", "branch", "checkpoint"}, words[1]) &&
				!(words[1] == "w" && len(words) == 2) && !slices.Contains(may, words[len(words)-1]) { // a plain w is the walk down the checkpoints
				t.Errorf("%s: %s", what, detail)
			}
			if strings.Contains(detail, "FOR ORDER BY") && !slices.Contains(may, sorted) {
				t.Errorf("%s: %s", what, detail)
			}
		}
		if err := rows.Err(); err != nil || steps == 0 {
			t.Errorf("%s: %d steps, %v", what, steps, err)
		}
	}
	for _, c := range []struct {
		f   InputFilter
		may string
	}{
		{InputFilter{States: InputStates[:LiveStates]}, "inbox_pending"},
		{InputFilter{Tenant: "d", Agent: "a", States: InputStates[:1]}, "inbox_pending"},
		{InputFilter{Tenant: "d", Run: "r", States: InputStates[:LiveStates]}, ""},
		{InputFilter{States: []string{InputDead}}, "inbox_dead"},
		{InputFilter{Tenant: "d", States: []string{InputDead}}, ""},
		{InputFilter{Tenant: "d", States: InputStates[:LiveStates+3]}, "inbox_pending inbox_cancelled"}, // consumed of no run: Inputs refuses that
		{InputFilter{Tenant: "d", Run: "r", States: []string{InputDead}}, ""},
		{InputFilter{States: []string{InputCancelled}}, "inbox_cancelled"},
		{InputFilter{States: []string{InputHanded, InputDropped}}, "inbox_ended"},
		{InputFilter{Tenant: "d", Run: "r", States: InputStates}, "inbox_cancelled"},
	} {
		f := c.f
		if f.Run == "" {
			f.States = slices.DeleteFunc(slices.Clone(f.States), func(s string) bool { return s == InputConsumed })
		}
		chosen, args := f.query()
		explain(fmt.Sprintf("%+v", f), append(strings.Fields(c.may), sorted), inputQuery+"WHERE i.id IN ("+chosen+") ORDER BY i.due_us, i.id",
			append([]any{1, true, f.Tenant, f.Run, f.Agent, 0, 0, 10}, args...)...)
	}
	for i, query := range findQueries {
		explain(fmt.Sprint("find ", i), []string{sorted}, query, "d", "r", "x")
	}
	explain("counts", []string{"inbox_pending", "inbox_dead"}, inboxCounts)
	for _, s := range []Selection{{All: true}, {All: true, Tenant: "d"}, {Tenant: "d", Run: "r"}} {
		explain(fmt.Sprintf("%+v", s), map[bool][]string{true: {sorted}}[s.Run != ""], s.deadQuery(), s.Tenant, s.Run, 0, "", 10)
	}
}

// What was handed over is found as long as its id is remembered, whoever chose that, and looked for no longer.
func TestFindInputThatWasHandedOver(t *testing.T) {
	n := newNode(t, one(scripted), routed("b=n2"))
	named := n.send("b", "r", "x", "{}")
	unnamed, err := Submit(t.Context(), n.store, Input{Tenant: "d", Agent: "b", Run: "r", Type: "t", Data: []byte("{}")})
	if err != nil {
		t.Fatal(err)
	}
	n.settle()
	for _, id := range []string{named.ID, unnamed.ID} {
		if in, err := FindInput(t.Context(), n.store, "d", "r", id); err != nil || in.State != InputHanded || in.Node != "n2" {
			t.Errorf("%s: %+v, %v", id, in, err)
		}
	}
	n.exec("DELETE FROM seen") // the window passed
	for _, id := range []string{named.ID, unnamed.ID} {
		if in, err := FindInput(t.Context(), n.store, "d", "r", id); !errors.Is(err, ErrNotFound) {
			t.Errorf("%s: %+v, %v", id, in, err)
		}
	}
	if got := n.inputs("r"); got != "x handed-over, "+unnamed.ID+" handed-over" {
		t.Errorf("inputs: %s", got)
	}
}

// After an unclean end, what waits for its turn alone is not in hand.
func TestInputsThatWaitForATurnAreNotRunning(t *testing.T) {
	n := newNode(t, one(scripted), quick)
	n.send("a", "r", "x", "{}")
	n.inHand(t)
	n.exec("UPDATE run SET claim_alone = 0") // others were in hand too
	state := func() string {
		in, err := FindInput(t.Context(), n.store, "d", "r", "x")
		if err != nil {
			t.Fatal(err)
		}
		return in.State
	}
	if got := state(); got != InputRunning {
		t.Errorf("in hand it is %s", got)
	}
	n.restart(t, one(scripted), quick)
	if got := state(); got != InputPending || n.show("r").Status != "ready" {
		t.Errorf("while it waits for its turn it is %s, its run %s", got, n.show("r").Status)
	}
	n.settle()
	if got := state(); got != InputConsumed {
		t.Errorf("after its turn it is %s", got)
	}
}

// An input without a run is shown to be elsewhere only if it will leave: not when its run has steps here, or others that
// go before it.
func TestInputsSayWhereAStrayGoes(t *testing.T) {
	n := newNode(t, map[string]agent.Agent{"b": agent.Func(scripted)}, quick)
	n.send("b", "began", "1", "{}")
	n.settle()
	n.send("b", "waits", "1", "{}")
	n.restart(t, one(scripted), routed("b=n2"))
	for _, run := range []string{"began", "waits", "new"} {
		n.exec(`INSERT INTO inbox (tenant, run_name, agent, input_id, type, source, arrived_us, due_us, data)
			VALUES ('d', ?, 'b', 'stray', 't', 'cli', 1, 1, x'7b7d')`, run)
	}
	check := func(run, state, node, why string) {
		t.Helper()
		in, err := FindInput(t.Context(), n.store, "d", run, "stray")
		if err != nil || in.State != state || in.Node != node || !strings.Contains(in.Reason, why) {
			t.Errorf("stray of run %s: %+v, %v, want %s", run, in, err, state)
		}
	}
	check("began", InputUnhosted, "", "agent b is not hosted here")
	check("waits", InputUnhosted, "", "agent b is not hosted here")
	check("new", InputElsewhere, "n2", "goes to node n2")
	n.settle()
	check("began", InputUnhosted, "", "agent b is not hosted here")
	if got := n.inputs("waits") + "; " + n.inputs("new"); got != "stray handed-over, 1 handed-over; stray handed-over" && got != "1 handed-over, stray handed-over; stray handed-over" {
		t.Errorf("inputs: %s", got)
	}
}

// An id stands for one input, whatever dead letters came under it later; without a memory of ids the newest counts.
func TestFindInputByWhatItsIDStandsFor(t *testing.T) {
	n := newNode(t, one(scripted), quick)
	n.send("a", "s", "1", `{"commands": [{"run": "r", "type": "t", "id": "c", "data": {}}, {"type": "t", "run": "r", "data": {}}]}`)
	n.settle()
	n.send("a", "s", "2", `{"commands": [{"run": "r", "type": "t", "id": "c", "data": {"next": "wait"}}]}`)
	n.settle()
	id := idPrefix + "n1/d/s/c"
	if got := n.inputs("r"); !strings.Contains(got, id+" consumed") || !strings.Contains(got, id+" dead") {
		t.Fatalf("inputs: %s", got)
	}
	in, err := FindInput(t.Context(), n.store, "d", "r", id)
	if err != nil || in.State != InputConsumed || in.Step == 0 || in.Branch != n.show("r").Branch || string(in.Data) != "{}" {
		t.Errorf("%+v, %v", in, err)
	}
	// One without an id of its own is found down the steps, on any branch.
	for i := range 40 {
		n.send("a", "r", fmt.Sprint(i), "{}")
	}
	n.settle()
	unnamed := n.value("SELECT input_id FROM inbox WHERE run_name = 'r' AND input_id LIKE 'pr:%/1/1'")
	for range 2 {
		if in, err := FindInput(t.Context(), n.store, "d", "r", unnamed); err != nil || in.State != InputConsumed || in.ID != unnamed {
			t.Errorf("%+v, %v", in, err)
		}
		n.rewind("r", 0)
	}
	for _, c := range [][3]string{{"d", "r", "nothing"}, {"d", "nobody", id}, {"e", "r", id}, {"d", record.NodeRun, id}} {
		if in, err := FindInput(t.Context(), n.store, c[0], c[1], c[2]); !errors.Is(err, ErrNotFound) {
			t.Errorf("%v: %+v, %v", c, in, err)
		}
	}
}

func TestChainLeadsFromInputToRecordToInput(t *testing.T) {
	n := newNode(t, one(scripted), quick)
	if _, err := Submit(t.Context(), n.store, Input{Tenant: "d", Agent: "a", Run: "r", ID: "1", Type: "order", Source: "cli", Trace: "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
		Data: []byte(`{"state": {"x": 1}, "events": [{"type": "e", "data": [1]}], "messages": [{"topic": "lamp", "text": "ON"}],
			"commands": [{"agent": "b@n2", "run": "far", "type": "t", "id": "f", "data": 7}, {"run": "near", "type": "t", "id": "n", "data": {}}]}`)}); err != nil {
		t.Fatal(err)
	}
	n.settle()
	for i := range 40 { // more than a mark apart
		n.send("a", "r", fmt.Sprint("x", i), `{"events": [{"type": "e2"}]}`)
	}
	n.settle()
	all, err := Chain(t.Context(), n.store, "d", "r", 100)
	if err != nil || len(all) != 42 {
		t.Fatalf("%d steps, %v", len(all), err)
	}
	start, first := all[0], all[1]
	if start.Step != 0 || start.In != nil || len(start.Records) != 1 || start.Records[0].Type != record.TypeRunStarted {
		t.Errorf("%+v", start)
	}
	if first.Step != 1 || first.In == nil || first.In.ID != "1" || first.In.Type != "order" || first.In.Source != "cli" || first.In.Correlation != "1" || first.In.Data != nil {
		t.Errorf("%+v", first)
	}
	var got []string
	for _, r := range first.Records {
		got = append(got, strings.Join([]string{fmt.Sprint(r.LSN), r.Kind, r.Type, r.Destination, r.Run, r.InputID, r.State, r.Correlation, r.Causation}, " "))
		if !strings.HasPrefix(r.Trace, "00-0af7651916cd43dd8448eb211c80319c") {
			t.Errorf("%+v", r)
		}
	}
	if want := "2 event e    pending 1 1|3 command t b@n2 far pr:n1/d/r/f pending 1 1|4 message  lamp   pending 1 1"; strings.Join(got, "|") != want {
		t.Errorf("records:\n%s, want\n%s", strings.Join(got, "|"), want)
	}
	if c := first.Commands; len(c) != 1 || c[0].Run != "near" || c[0].ID != "pr:n1/d/r/n" || c[0].State != InputConsumed || c[0].Correlation != "1" || c[0].Causation == "" {
		t.Errorf("%+v", c)
	}
	// The next link has what this one made as its input.
	near, err := Chain(t.Context(), n.store, "d", "near", 1)
	if err != nil || len(near) != 1 || near[0].In.ID != first.Commands[0].ID || near[0].In.Correlation != "1" || near[0].In.Causation != first.Commands[0].Causation {
		t.Errorf("%+v, %v", near, err)
	}
	for i, l := range all[2:] {
		if l.In == nil || l.In.ID != fmt.Sprint("x", i) || len(l.Records) != 1 || l.Records[0].LSN != l.LSN || len(l.Commands) != 0 {
			t.Errorf("step %d: %+v", l.Step, l)
		}
	}

	// One step with all its data, also when it was taken back.
	for _, live := range []bool{true, false} {
		l, err := EffectsOf(t.Context(), n.store, first.Branch, 1)
		if err != nil || l.Live != live || string(l.State) != `{"x": 1}` || len(l.Records) != 3 || string(l.Records[0].Data) != "[1]" ||
			string(l.Records[2].Data) != "ON" || string(l.In.Data[:9]) != `{"state":` {
			t.Errorf("live %t: %+v, %v", live, l, err)
		}
		n.rewind("r", 0)
	}
	for _, c := range []struct {
		branch string
		step   int64
	}{{first.Branch, 99}, {"01ARZ3NDEKTSV4RRFFQ69G5FAV", 1}, {n.show("r").Branch, 0}} {
		if l, err := EffectsOf(t.Context(), n.store, c.branch, c.step); !errors.Is(err, ErrNotFound) {
			t.Errorf("%v: %+v, %v", c, l, err)
		}
	}
}

// A record of the runtime's own that comes after a step is no effect of it.
func TestEffectsAreThoseOfTheStepAlone(t *testing.T) {
	m := moody{"2": agent.Retryable}
	n := moodyNode(t, m, quick)
	n.send("a", "r", "1", `{"events": [{"type": "e"}]}`)
	n.send("a", "r", "2", `{}`)
	n.settle()
	n.mustBe("r", "paused", "1")
	clear(m)
	if _, err := Resume(t.Context(), n.store, "d", "r", ""); err != nil {
		t.Fatal(err)
	}
	n.settle()
	for step, want := range map[int64]int{1: 1, 2: 0} {
		l, err := EffectsOf(t.Context(), n.store, n.show("r").Branch, step)
		if err != nil || len(l.Records) != want {
			t.Errorf("step %d: %+v, %v", step, l.Records, err)
		}
	}
}

// What waits for a best-effort route says why the relay cannot send it, and when that is tried again.
func TestInputSaysThatTheRelayHasNoSession(t *testing.T) {
	n := newNode(t, one(scripted), routed("b=n2,best-effort", "c=n2"))
	n.send("b", "r", "x", "{}")
	n.send("c", "r", "y", "{}")
	n.exec("UPDATE inbox SET next_us = ? WHERE input_id IN ('x', 'y')", n.store.SteadyUS()-1)
	later := time.Now().Add(time.Hour).UnixMicro()
	for _, c := range []struct {
		lease       []any // last error and next try
		why         string
		nextX, next int64
	}{
		{nil, "goes to node n2", 0, 0},
		{[]any{"refused", later}, "goes to node n2, and the relay has no session: refused", later, 0},
		{[]any{"refused", 1}, "goes to node n2, and the relay has no session: refused", 0, 0},
		{[]any{nil, nil}, "goes to node n2", 0, 0},
	} {
		if c.lease != nil {
			n.exec("INSERT OR REPLACE INTO relay_lease (id, fence, holder, since_us, last_error, next_us) VALUES (1, 1, 'h', 1, ?, ?)", c.lease...)
		}
		x, err := FindInput(t.Context(), n.store, "d", "r", "x")
		y, yerr := FindInput(t.Context(), n.store, "d", "r", "y")
		if err != nil || x.State != InputElsewhere || x.Reason != c.why || x.NextUS != c.nextX {
			t.Errorf("%v: %s, %q, next try %d, %v", c.lease, x.State, x.Reason, x.NextUS, err)
		}
		if yerr != nil || y.Reason != "goes to node n2" || y.NextUS != c.next {
			t.Errorf("%v: the one with an outbox: %q, next try %d, %v", c.lease, y.Reason, y.NextUS, yerr)
		}
	}
}

// A timer of a run that ended does not come due before the run is reopened.
func TestTimerOfARunThatIsOverSaysSo(t *testing.T) {
	n := newNode(t, one(scripted), quick)
	if _, err := Submit(t.Context(), n.store, Input{Tenant: "d", Agent: "a", Run: "r", ID: "timer", Type: "t", Data: []byte("{}"), In: time.Hour}); err != nil {
		t.Fatal(err)
	}
	if in, err := FindInput(t.Context(), n.store, "d", "r", "timer"); err != nil || in.RunOver() || in.Reason != "" {
		t.Errorf("before the end: %+v, %v", in, err)
	}
	n.send("a", "r", "end", `{"next": "done"}`)
	n.settle()
	in, err := FindInput(t.Context(), n.store, "d", "r", "timer")
	if err != nil || in.State != InputWaiting || !in.RunOver() || in.Reason != "its run is done" {
		t.Errorf("%+v, %v", in, err)
	}
	if end, err := FindInput(t.Context(), n.store, "d", "r", "end"); err != nil || end.RunOver() || end.Reason != "" {
		t.Errorf("the input that ended it: %+v, %v", end, err)
	}
	if _, err := Reopen(t.Context(), n.store, "d", "r", ""); err != nil {
		t.Fatal(err)
	}
	if in, err := FindInput(t.Context(), n.store, "d", "r", "timer"); err != nil || in.RunOver() || in.Reason != "" {
		t.Errorf("reopened: %+v, %v", in, err)
	}
}

// A command for another node that was cancelled while it waited has no run here, and is listed by the run it was for.
func TestCancelledStrayIsListedByItsRun(t *testing.T) {
	n := newNode(t, one(scripted), routed("b=n2"))
	n.send("a", "r", "go", `{"commands": [{"agent": "b", "run": "r2", "type": "t", "data": {}, "id": "c", "in": "1h"}]}`)
	n.settle()
	n.send("a", "r", "stop", `{"cancel": ["c"]}`)
	n.settle()
	list, _, err := Inputs(t.Context(), n.store, InputFilter{Tenant: "d", Run: "r2", States: InputStates, Limit: 10})
	if err != nil || len(list) != 1 || list[0].State != InputCancelled {
		t.Errorf("%+v, %v", list, err)
	}
}
