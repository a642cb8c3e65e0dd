package executor

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus/testutil"

	"postrider/internal/agent"
	"postrider/internal/record"
	"postrider/internal/sqlite"
	"postrider/outbox"
)

// steps gives run r so many steps with one event each, so that step s ends at LSN s+1.
func (n *node) steps(run string, from, to int) {
	n.t.Helper()
	for i := from; i <= to; i++ {
		n.send("a", run, fmt.Sprint("in", i), `{"events": [{"type": "e`+fmt.Sprint(i)+`"}]}`)
	}
	n.settle()
}

// ship acknowledges everything pending up to an LSN of one branch.
func (n *node) ship(branch string, lsn int64) {
	n.t.Helper()
	box := outbox.New(n.store, n.node)
	fence, err := box.Lease(context.Background(), "test")
	if err != nil {
		n.t.Fatalf("%v", err)
	}
	items, err := box.Drain(context.Background(), "", new(outbox.Cursor), 1000)
	if err != nil {
		n.t.Fatalf("%v", err)
	}
	for _, it := range items {
		if it.Key.Branch == branch && it.LSN == lsn {
			if err := box.Ack(context.Background(), fence, []outbox.Shipped{{Branch: it.Branch, LSN: it.LSN, Bytes: it.Bytes, Recorded: it.Recorded}}); err != nil {
				n.t.Fatalf("%v", err)
			}
			return
		}
	}
	n.t.Fatalf("record %d of branch %s is not pending", lsn, branch)
}

func TestRewindOpensABranchAtAStep(t *testing.T) {
	n := newNode(t, one(scripted), quick)
	n.steps("r", 1, 20)
	root := n.show("r").Branch
	n.ship(root, 13)

	out := n.rewind("r", 10)
	want := Rewound{Tenant: "d", Run: "r", Branch: out.Branch, Gen: 2, Parent: root, ForkStep: 10, ForkLSN: 11, Withheld: 8, Shipped: 2}
	if out != want || out.Branch == root || record.CheckBranch(out.Branch) != nil {
		t.Errorf("rewound %+v, want %+v", out, want)
	}
	n.settle()
	n.mustBe("r", "idle", "10")
	d := n.show("r")
	if d.Branch != out.Branch || d.Step != 10 || d.LSN != 12 || d.Gen != 2 || d.Pending != 0 {
		t.Errorf("run %+v", d.RunInfo)
	}
	wantBranches := []BranchInfo{
		{Branch: root, Gen: 1, Step: 20, LSN: 21, Shipped: 13},
		{Branch: out.Branch, Gen: 2, Parent: root, ForkStep: 10, ForkLSN: 11, Step: 10, LSN: 12, Shipped: 11, Live: true},
	}
	if !slices.Equal(d.Branches, wantBranches) {
		t.Errorf("branches\n%+v\nwant\n%+v", d.Branches, wantBranches)
	}
	if got := n.value("SELECT CAST(data AS TEXT) || prevlsn FROM outbox WHERE type = 'postrider.branch.opened'"); got != `{"parent":"`+root+`","fork_step":10,"fork_lsn":11,"reason":"rewind"}11` {
		t.Errorf("branch.opened %s", got)
	}
	// Inputs from outside that abandoned steps consumed are not given again, and their ids stay used.
	if out := n.send("a", "r", "in15", `{"events": [{"type": "e15"}]}`); !out.Duplicate {
		t.Error("the id of an input from outside is free again")
	}
	n.steps("r", 101, 102)
	n.mustBe("r", "idle", "12")
	if got := n.exported("r"); len(got) != 14 || !slices.Equal(got[10:], []string{"11 e10", "12 postrider.branch.opened", "13 e101", "14 e102"}) {
		t.Errorf("exported lineage %v", got)
	}
	stats, err := outbox.New(n.store, "n1").Stats(t.Context(), "")
	if err != nil {
		t.Fatal(err)
	}
	if stats.Pending != 3 || stats.Shipped != 13 || stats.Withheld != 8 {
		t.Errorf("stats %+v", stats)
	}
}

func TestRewindFindsTheBranchThatHoldsTheStep(t *testing.T) {
	n := newNode(t, one(scripted), quick)
	n.steps("r", 1, 40)
	a := n.show("r").Branch
	b := n.rewind("r", 20).Branch
	n.settle()
	n.steps("r", 41, 60) // b: steps 21 to 40
	c := n.rewind("r", 30).Branch
	n.settle()
	for _, s := range []struct {
		to     int64
		parent string
	}{
		{30, b},  // the fork step itself: never the branch that has no step of its own
		{25, b},  // of the grandparent's child
		{20, a},  // b's own fork step
		{5, a},   //
		{16, ""}, // beyond the head by now
	} {
		if s.parent == "" {
			if _, err := Rewind(t.Context(), n.store, "d", "r", s.to, ""); !errors.Is(err, ErrNotFound) {
				t.Errorf("rewind to %d: %v, want ErrNotFound", s.to, err)
			}
			continue
		}
		out := n.rewind("r", s.to)
		if out.Parent != s.parent || out.ForkStep != s.to {
			t.Errorf("rewind to %d: %+v, want parent %s", s.to, out, s.parent)
		}
		n.settle()
		n.mustBe("r", "idle", fmt.Sprint(s.to))
	}
	_ = c
}

func TestRewindToTheBeginningToTheHeadAndToNowhere(t *testing.T) {
	n := newNode(t, one(scripted), quick)
	n.steps("r", 1, 3)
	before := dump(t, n.store, false)
	for _, c := range []struct {
		run    string
		to     int64
		reason string
		want   error
	}{{"r", 4, "", ErrNotFound}, {"r", -1, "", ErrNotFound}, {"nobody", 0, "", ErrNotFound}, {"r", 1, "a\nb", ErrInvalid}, {"r", 1, strings.Repeat("x", 1025), ErrInvalid}} {
		if _, err := Rewind(t.Context(), n.store, "d", c.run, c.to, c.reason); !errors.Is(err, c.want) {
			t.Errorf("run %s to %d for %.10q: %v, want %v", c.run, c.to, c.reason, err, c.want)
		}
	}
	mustEqual(t, "after refusals", dump(t, n.store, false), before)

	if out := n.rewind("r", 3); out.Withheld != 0 || out.ForkLSN != 4 {
		t.Errorf("to the head: %+v", out)
	}
	n.settle()
	n.mustBe("r", "idle", "3")
	if out := n.rewind("r", 0); out.ForkLSN != 1 || out.Withheld != 4 {
		t.Errorf("to the beginning: %+v", out)
	}
	n.settle()
	n.mustBe("r", "idle", "null")
	n.steps("r", 4, 4)
	n.mustBe("r", "idle", "1")
	if got := strings.Join(n.exported("r"), ", "); got != "1 postrider.run.started, 2 postrider.branch.opened, 3 e4" {
		t.Errorf("records %s", got)
	}
}

// Each rewind counts what it abandons itself, not what an earlier one did.
func TestRewindOfARewindOfARewind(t *testing.T) {
	n := newNode(t, one(scripted), quick)
	n.steps("r", 1, 10) // LSN 11
	n.ship(n.show("r").Branch, 9)
	first := n.rewind("r", 7) // keeps 8; 9 is shipped, 10 and 11 withheld
	n.settle()
	n.steps("r", 11, 13) // LSNs 9 (opened) to 12
	second := n.rewind("r", 9)
	n.settle()
	n.steps("r", 14, 14)
	third := n.rewind("r", 5)
	n.settle()
	for i, c := range []struct {
		out               Rewound
		withheld, shipped int64
	}{
		{first, 2, 1},
		{second, 1, 0},
		{third, 0 + 3 + 2, 2}, // of the root 7 and 8, both shipped; of the second 9 to 11; of the third 12 and 13
	} {
		if c.out.Withheld != c.withheld || c.out.Shipped != c.shipped || c.out.Gen != int64(i+2) {
			t.Errorf("rewind %d: %+v, want %d withheld, %d shipped", i+1, c.out, c.withheld, c.shipped)
		}
	}
	n.mustBe("r", "idle", "5")
	if got := n.exported("r"); len(got) != 7 || got[6] != "7 postrider.branch.opened" {
		t.Errorf("records %v", got)
	}
	stats, err := outbox.New(n.store, "n1").Stats(t.Context(), "")
	if err != nil {
		t.Fatal(err)
	}
	if stats.Pending != 1 || stats.Withheld != 2+4+2 {
		t.Errorf("stats %+v", stats)
	}
}

func TestRewindToAContinueGoesOnAtOnce(t *testing.T) {
	var inputs []bool
	n := newNode(t, one(func(ctx context.Context, s agent.Step) (agent.Effects, error) {
		inputs = append(inputs, s.Input != nil)
		if s.Input == nil {
			return agent.Effects{State: []byte(fmt.Sprint(s.Number * 10))}, nil
		}
		return scripted(ctx, s)
	}), quick)
	n.send("a", "r", "x", `{"next": "continue"}`)
	n.settle()
	n.mustBe("r", "idle", "20")
	n.rewind("r", 1)
	n.settle()
	n.mustBe("r", "idle", "20")
	if !slices.Equal(inputs, []bool{true, false, false}) {
		t.Errorf("steps had inputs %v", inputs)
	}
}

func TestRewindOfADoneRun(t *testing.T) {
	n := newNode(t, one(scripted), quick)
	n.steps("r", 1, 2)
	n.send("a", "r", "end", `{"next": "done"}`)
	n.send("a", "r", "behind", `{}`)
	n.settle()
	n.mustBe("r", "done", "3")
	n.rewind("r", 3) // to its end: still over
	n.settle()
	n.mustBe("r", "done", "3")
	n.rewind("r", 2)
	n.settle()
	n.mustBe("r", "idle", "3") // with what waited behind
	if got := n.stepInputs("r"); !slices.Equal(got, []string{"in1", "in2", "behind"}) {
		t.Errorf("steps had inputs %v", got)
	}
	if got := n.exported("r"); !slices.Contains(got, "4 postrider.branch.opened") || slices.Contains(got, "4 postrider.run.done") {
		t.Errorf("records %v", got)
	}
}

func TestRewindResumesAPausedRun(t *testing.T) {
	o := quick
	o.MaxAttempts = 1
	broken := true
	n := newNode(t, one(func(ctx context.Context, s agent.Step) (agent.Effects, error) {
		if s.Input.ID == "bad" && broken {
			return agent.Effects{}, errors.New("broken")
		}
		return scripted(ctx, s)
	}), o)
	n.steps("r", 1, 2)
	n.send("a", "r", "bad", "{}")
	n.settle()
	n.mustBe("r", "paused", "2")
	broken = false
	if out := n.rewind("r", 2); out.Withheld != 1 { // run.paused came after the step
		t.Errorf("%+v", out)
	}
	n.settle()
	n.mustBe("r", "idle", "3")
	if got := strings.Join(n.exported("r"), ", "); got != "1 postrider.run.started, 2 e1, 3 e2, 4 postrider.branch.opened" {
		t.Errorf("records %s", got)
	}
}

// What was pending at the step is pending again; what came of abandoned steps has never been.
func TestRewindRestoresTheInbox(t *testing.T) {
	n := newNode(t, map[string]agent.Agent{"a": agent.Func(scripted), "b": agent.Func(scripted)}, quick)
	// Step 1 leaves a command for later, a timer, and one for another run.
	n.send("a", "r", "1", `{"commands": [{"type": "t", "id": "kept", "in": "1h", "data": {}}, {"type": "t", "id": "timer", "in": "2h", "data": {}},
		{"agent": "b", "run": "peer", "type": "t", "id": "standing", "data": {}}, {"agent": "b", "run": "peer", "type": "t", "id": "peer-timer", "in": "1h", "data": {}}]}`)
	n.settle()
	// Step 2 makes more of them and cancels two; step 3 consumes the first; step 4 one of step 2's.
	n.send("a", "r", "2", `{"cancel": ["timer", "peer-timer"], "commands": [{"type": "t", "id": "gone", "in": "1h", "data": {}}, {"type": "t", "id": "used", "in": "1m", "data": {}},
		{"agent": "b", "run": "peer", "type": "t", "id": "consumed", "data": {}}, {"agent": "b", "run": "peer", "type": "t", "id": "unread", "in": "1h", "data": {}},
		{"agent": "b", "run": "peer", "type": "t", "id": "standing", "data": {"state": 9}}]}`)
	n.settle()
	for _, id := range []string{"kept", "used"} {
		n.exec("UPDATE inbox SET due_us = arrived_us WHERE command_id = ?", id)
		n.exec("UPDATE run SET wake_us = 1 WHERE name = 'r'")
		n.settle()
	}
	n.mustBe("r", "waiting", "4")
	n.mustBe("peer", "waiting", "2")
	if got := n.value("SELECT count(*) FROM inbox WHERE outcome = 'dead'"); got != "1" {
		t.Fatalf("%s dead letters, want the one with other content", got)
	}

	out := n.rewind("r", 1)
	if out.Restored != 3 || out.Removed != 3 { // kept, timer, peer-timer · gone, unread, the dead letter
		t.Errorf("restored %d, removed %d, want 3 and 3", out.Restored, out.Removed)
	}
	if got := n.value("SELECT count(*) FROM inbox WHERE outcome = 'dead'"); got != "0" {
		t.Error("the dead letter of an abandoned step is still there")
	}
	peer := n.show("peer")
	if peer.Pending != 1 || peer.WakeUS == 0 || peer.Status != "waiting" {
		t.Errorf("peer: %+v, want the timer pending and a time to wake", peer.RunInfo)
	}
	n.settle()
	n.mustBe("r", "waiting", "2") // kept is due and comes again
	if got := n.stepInputs("r"); !slices.Equal(got, []string{"1", "pr:n1/d/r/kept"}) {
		t.Errorf("steps had inputs %v", got)
	}
	if d := n.show("r"); d.Pending != 1 {
		t.Errorf("%d inputs wait, want the timer", d.Pending)
	}

	// The ids of abandoned commands can be used again, unless a step that stands consumed them; that of a kept one cannot.
	n.send("a", "r", "3", `{"commands": [{"type": "t", "id": "gone", "data": {"state": "again"}}, {"agent": "b", "run": "peer", "type": "t", "id": "consumed", "data": {}},
		{"agent": "b", "run": "peer", "type": "t", "id": "standing", "data": {}}, {"agent": "b", "run": "peer", "type": "t", "id": "unread", "data": {"state": "read"}}]}`)
	n.settle()
	n.mustBe("r", "waiting", `"again"`)
	n.mustBe("peer", "waiting", `"read"`)
	if d := n.show("peer"); d.Step != 3 {
		t.Errorf("peer took %d steps, want 3: consumed and standing are duplicates", d.Step)
	}
}

// A step that an earlier rewind of its run abandoned is no consumer any more: the command it consumed never was.
func TestCommandConsumedByAnAbandonedStepOfAnotherRunIsForgotten(t *testing.T) {
	n := newNode(t, map[string]agent.Agent{"a": agent.Func(scripted), "b": agent.Func(scripted)}, quick)
	const send = `{"commands": [{"agent": "b", "run": "peer", "type": "t", "id": "c", "data": {}}]}`
	n.send("a", "r", "1", send)
	n.settle()
	n.mustBe("peer", "idle", "1")
	n.rewind("peer", 0)
	n.settle()
	n.mustBe("peer", "idle", "null") // from outside: not given again
	n.rewind("r", 0)
	n.send("a", "r", "2", send)
	n.settle()
	n.mustBe("peer", "idle", "1")
}

// Each abandoned step is undone once: a command whose consumer stood then keeps its id, whatever is rewound later.
func TestLaterRewindsDoNotUndoAStepAgain(t *testing.T) {
	n := newNode(t, map[string]agent.Agent{"a": agent.Func(scripted), "b": agent.Func(scripted)}, quick)
	const send = `{"commands": [{"agent": "b", "run": "peer", "type": "t", "id": "c", "data": {}}]}`
	n.send("a", "r", "1", "{}")
	n.send("a", "r", "2", send)
	n.settle()
	n.rewind("r", 1) // while the peer's step stands
	n.rewind("peer", 0)
	n.rewind("r", 0)
	n.send("a", "r", "3", send)
	n.settle()
	n.mustBe("peer", "idle", "null")
}

// An input restored by one rewind and consumed on the new branch is restored once more by the next.
func TestRewindRestoresAnInputOnce(t *testing.T) {
	n := newNode(t, one(scripted), quick)
	n.send("a", "r", "1", `{"commands": [{"type": "t", "data": {}}]}`)
	n.settle()
	for range 3 {
		if out := n.rewind("r", 1); out.Restored != 1 {
			t.Errorf("restored %d, want 1", out.Restored)
		}
		n.settle()
		n.mustBe("r", "idle", "2")
	}
	if out := n.rewind("r", 0); out.Restored != 0 || out.Removed != 0 {
		t.Errorf("%+v: the command's creator is abandoned", out)
	}
	n.settle()
	n.mustBe("r", "idle", "null")
}

// The run of a restored input may have gone to sleep without it.
func TestRewindWakesTheRunOfARestoredInput(t *testing.T) {
	n := newNode(t, one(scripted), quick)
	n.send("a", "r", "1", `{"commands": [{"run": "peer", "type": "t", "in": "1h", "id": "timer", "data": {}}]}`)
	n.settle()
	n.send("a", "r", "2", `{"cancel": ["timer"]}`)
	n.settle()
	n.exec("UPDATE run SET wake_us = 1 WHERE name = 'peer'")
	n.settle()
	n.mustBe("peer", "idle", "null")
	n.rewind("r", 1)
	n.mustBe("peer", "waiting", "null")
	if got := n.value("SELECT wake_us = due_us FROM run JOIN inbox ON inbox.run = run.id WHERE name = 'peer'"); got != "1" {
		t.Error("the run does not wake when its input is due")
	}
}

// The other run may be in hand with, wait for, or be paused at an input that the rewind removes.
func TestRewindFreesRunsFromRemovedInputs(t *testing.T) {
	o := Options{BackoffMin: time.Hour, BackoffMax: time.Hour, MaxAttempts: 1}
	n := newNode(t, map[string]agent.Agent{"a": agent.Func(scripted), "b": agent.Func(func(ctx context.Context, s agent.Step) (agent.Effects, error) {
		if s.Input.Type == "poison" {
			return agent.Effects{}, errors.New("no")
		}
		return scripted(ctx, s)
	})}, o)
	n.send("a", "r", "x", `{"commands": [{"agent": "b", "run": "peer", "type": "poison", "data": {}}]}`)
	n.settle()
	n.send("b", "peer", "next", `{}`)
	n.mustBe("peer", "paused", "null")
	n.rewind("r", 0)
	n.settle()
	n.mustBe("peer", "idle", "1")
	if got := strings.Join(n.exported("peer"), ", "); got != "1 postrider.run.started, 2 postrider.run.paused, 3 postrider.run.resumed" {
		t.Errorf("records %s", got)
	}
}

func TestRewindFencesTheStepInProgress(t *testing.T) {
	entered, ended := make(chan struct{}, 1), make(chan error, 1)
	blocking := true
	n := newNode(t, one(func(ctx context.Context, s agent.Step) (agent.Effects, error) {
		if s.Input.ID == "slow" && blocking {
			blocking = false
			entered <- struct{}{}
			<-ctx.Done()
			ended <- context.Cause(ctx)
			return agent.Effects{State: []byte(`"late"`), Events: []agent.Event{{Type: "late"}}}, nil
		}
		return scripted(ctx, s)
	}), quick)
	n.steps("r", 1, 3)
	n.start(t)
	n.send("a", "r", "slow", "{}")
	n.send("a", "other", "x", "{}")
	n.Wake()
	receive(t, "the step", entered)
	if _, err := Rewind(t.Context(), n.second(t), "d", "r", 2, ""); err != nil { // another process
		t.Fatal(err)
	}
	if err := receive(t, "the agent is told", ended); !errors.Is(err, errRewound) {
		t.Errorf("the agent is told %v", err)
	}
	// By the poll alone, which is what makes it half a second; how fast this machine is, is no matter of the test.
	if n.o.Poll > 250*time.Millisecond {
		t.Errorf("other processes' writes are looked for every %s", n.o.Poll)
	}
	// The input was pending at that step and still is: it is given again.
	eventually(t, "the run goes on", func() bool { return n.show("r").Status == "idle" })
	n.mustBe("r", "idle", "3")
	if got := n.stepInputs("r"); !slices.Equal(got, []string{"in1", "in2", "slow"}) {
		t.Errorf("steps had inputs %v", got)
	}
	if got := n.value("SELECT count(*) FROM outbox WHERE type = 'late'"); got != "0" {
		t.Error("a record of the fenced step is there")
	}
	if got := testutil.ToFloat64(n.m.steps.WithLabelValues("a", "fenced")); got != 1 {
		t.Errorf("%g steps are counted as fenced, want 1", got)
	}
	n.mustBe("other", "idle", "1")
}

// A timer may be cancelled and set anew under its id, also in one step; a rewind puts back the one of its time.
func TestCancelledCommandLetsGoOfItsID(t *testing.T) {
	n := newNode(t, one(scripted), quick)
	timers := func(want string) {
		t.Helper()
		n.settle()
		got := n.value("SELECT group_concat(CAST(data AS TEXT) || iif(cancelled_step IS NULL, '', ' cancelled') || COALESCE(' ' || outcome, ''), ', ') FROM (SELECT * FROM inbox WHERE command_id = 'k' ORDER BY id)")
		if got != want {
			t.Errorf("timers: %s, want %s", got, want)
		}
	}
	n.send("a", "r", "1", `{"commands": [{"type": "t", "in": "1h", "id": "k", "data": 1}]}`)
	timers("1")
	n.send("a", "r", "2", `{"cancel": ["k"], "commands": [{"type": "t", "in": "2h", "id": "k", "data": 2}]}`)
	timers("1 cancelled, 2")
	n.send("a", "r", "3", `{"cancel": ["k"]}`)
	timers("1 cancelled, 2 cancelled")
	n.send("a", "r", "4", `{"commands": [{"type": "t", "in": "3h", "id": "k", "data": 3}]}`)
	timers("1 cancelled, 2 cancelled, 3")
	n.rewind("r", 2)
	timers("1 cancelled, 2")
	n.send("a", "r", "5", `{"commands": [{"type": "t", "in": "3h", "id": "k", "data": 2}]}`) // the same again
	timers("1 cancelled, 2")
	n.rewind("r", 1)
	timers("1")
	n.send("a", "r", "6", `{"commands": [{"type": "t", "in": "3h", "id": "k", "data": 9}]}`)
	timers("1, 9 dead")
}

// A timer by the wall clock that a rewind puts back goes by the clock as it was set meanwhile.
func TestRewoundTimerFollowsTheClock(t *testing.T) {
	base := time.Now()
	var set time.Duration
	n := &node{t: t, path: filepath.Join(t.TempDir(), "n.db"), clocks: sqlite.Clocks{Wall: func() time.Time { return base.Add(time.Since(base) + set) }}}
	n.open(t, one(scripted), quick)
	t.Cleanup(func() {
		if err := n.store.Close(); err != nil {
			t.Error(err)
		}
	})
	n.send("a", "r", "1", `{"commands": [{"type": "t", "at": "`+base.Add(2*time.Hour).UTC().Format(time.RFC3339)+`", "id": "c", "data": {}}]}`)
	n.settle()
	n.send("a", "r", "2", `{"cancel": ["c"]}`)
	n.settle()
	set = time.Hour
	if err := n.watchClocks(t.Context()); err != nil {
		t.Fatal(err)
	}
	n.rewind("r", 1)
	var due int64
	if err := n.store.Get(t.Context(), "SELECT due_us FROM inbox WHERE command_id = 'c'", nil, &due); err != nil {
		t.Fatal(err)
	}
	if in := time.Duration(due-n.store.SteadyUS()) * time.Microsecond; in < 59*time.Minute || in > 61*time.Minute {
		t.Errorf("it is due in %s, want an hour", in)
	}
}
