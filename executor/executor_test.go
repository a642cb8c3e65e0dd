package executor

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"

	"postrider/internal/agent"
	"postrider/internal/sqlite"
)

func TestStepsOfOneRunAreStrictlyInOrder(t *testing.T) {
	const runs, inputs = 100, 8
	var mu sync.Mutex
	inHand := map[string]bool{}
	var now, most atomic.Int64
	together := make(chan struct{})
	n := newNode(t, one(func(_ context.Context, s agent.Step) (agent.Effects, error) {
		mu.Lock()
		if inHand[s.Run] {
			t.Errorf("two steps of run %s at once", s.Run)
		}
		inHand[s.Run] = true
		mu.Unlock()
		if k := now.Add(1); k > most.Load() {
			most.Store(k)
			if k == 64 {
				close(together)
			}
		}
		if s.Number == 1 {
			select { // all workers are here at once
			case <-together:
			case <-time.After(20 * time.Second):
				t.Error("64 runs are never in hand together")
			}
		}
		now.Add(-1)
		mu.Lock()
		inHand[s.Run] = false
		mu.Unlock()
		state := strings.Trim(string(s.State), `"`)
		if state == "null" {
			state = ""
		}
		return agent.Effects{State: []byte(`"` + state + s.Input.ID + `"`), Events: []agent.Event{{Type: "e"}}}, nil
	}), quick)
	for i := range inputs {
		for r := range runs {
			n.send("a", fmt.Sprint("r", r), fmt.Sprint(i), "1")
		}
	}
	n.start(t)
	eventually(t, "all steps", func() bool { return n.value("SELECT count(*) FROM inbox WHERE consumed_step IS NULL") == "0" })
	if most.Load() != 64 {
		t.Errorf("%d runs were in hand at once, want all 64 workers", most.Load())
	}
	for r := range runs {
		n.mustBe(fmt.Sprint("r", r), "idle", `"01234567"`)
	}
}

func TestMoreRunsThanWorkersStarveNobody(t *testing.T) {
	o := quick
	o.Workers = 2
	steps := map[string]int{}
	var mu sync.Mutex
	var lead atomic.Int64
	n := newNode(t, one(func(_ context.Context, s agent.Step) (agent.Effects, error) {
		mu.Lock()
		defer mu.Unlock()
		steps[s.Run]++
		least := steps[s.Run]
		for r := range 8 {
			least = min(least, steps[fmt.Sprint("r", r)])
		}
		lead.Store(max(lead.Load(), int64(steps[s.Run]-least)))
		e := agent.Effects{Next: agent.Continue} // has always more to do
		if steps[s.Run] == 30 {
			e.Next = agent.Done
		}
		return e, nil
	}), o)
	for r := range 8 {
		n.send("a", fmt.Sprint("r", r), "", "1")
	}
	n.start(t)
	eventually(t, "all runs", func() bool { return n.value("SELECT count(*) FROM run WHERE status = 'done'") == "8" })
	if lead.Load() > 15 {
		t.Errorf("a run was %d steps ahead of another", lead.Load())
	}
}

// failing is an agent whose first attempts fail in some way.
func failing(times int64, how func(s agent.Step) error) agent.Func {
	return func(ctx context.Context, s agent.Step) (agent.Effects, error) {
		if s.Attempt <= times {
			if err := how(s); err != nil {
				return agent.Effects{}, err
			}
		}
		return scripted(ctx, s)
	}
}

func TestFailedAttemptIsTriedAgain(t *testing.T) {
	var ids []string
	for name, how := range map[string]func(s agent.Step) error{
		"error":     func(agent.Step) error { return errors.New("broken") },
		"panic":     func(agent.Step) error { panic("broken") },
		"nil map":   func(agent.Step) error { map[string]int(nil)["broken"] = 1; return nil }, //nolint:staticcheck // it is to panic
		"retryable": func(agent.Step) error { return &agent.Error{Code: agent.Retryable, Message: "broken"} },
	} {
		t.Run(name, func(t *testing.T) {
			ids = nil
			n := newNode(t, one(failing(3, func(s agent.Step) error {
				ids = append(ids, s.ID())
				if s.Attempt > 1 && s.LastError == "" {
					t.Error("an attempt does not know why the last one failed")
				}
				return how(s)
			})), quick)
			n.send("a", "r", "x", "{}")
			n.settle()
			n.mustBe("r", "idle", "1")
			if len(ids) != 3 || ids[0] != ids[2] {
				t.Errorf("attempts had ids %v", ids)
			}
			if d := n.show("r"); d.Attempts != 0 || d.LastError != "" {
				t.Errorf("after success: %d attempts, last error %q", d.Attempts, d.LastError)
			}
		})
	}
}

func TestExhaustedRunIsPausedAndSaysSo(t *testing.T) {
	o := quick
	o.MaxAttempts = 3
	var rings atomic.Int64
	o.Notify = func() { rings.Add(1) }
	n := newNode(t, map[string]agent.Agent{"a": failing(100, func(s agent.Step) error {
		return fmt.Errorf("attempt %d: \xff \"quoted\"\n", s.Attempt)
	}), "b": agent.Func(scripted)}, o)
	n.send("a", "r", "x", "{}")
	n.send("a", "r", "y", "{}")
	n.send("b", "healthy", "", "{}")
	n.settle()
	n.mustBe("r", "paused", "null")
	n.mustBe("healthy", "idle", "1")
	d := n.show("r")
	if d.Pending != 2 || d.Attempts != 3 || !strings.HasPrefix(d.LastError, "attempt 3: ") {
		t.Errorf("run %+v", d.RunInfo)
	}
	if got := strings.Join(n.exported("r"), ", "); got != "1 postrider.run.started, 2 postrider.run.paused" {
		t.Errorf("records %s", got)
	}
	if got := n.value("SELECT CAST(data AS TEXT) FROM outbox WHERE type = 'postrider.run.paused'"); got != `{"reason":"3 failed attempts"}` {
		t.Errorf("reason %s", got)
	}
	if got := n.value("SELECT attempts FROM inbox WHERE input_id = 'x'"); got != "3" {
		t.Errorf("the input has %s attempts", got)
	}
	if rings.Load() == 0 {
		t.Error("nobody was told of the record")
	}
	n.send("a", "r", "z", "{}") // nothing overtakes
	n.settle()
	n.mustBe("r", "paused", "null")
}

func TestDeadLetterSetsTheInputAside(t *testing.T) {
	for name, c := range map[string]struct {
		deadLetter bool
		attempts   int64
		err        error
	}{
		"exhausted": {true, 3, errors.New("broken")},
		"terminal":  {false, 1, &agent.Error{Code: agent.Terminal, Message: "broken"}},
	} {
		t.Run(name, func(t *testing.T) {
			o := quick
			o.MaxAttempts, o.DeadLetter = 3, c.deadLetter
			asked := int64(0)
			n := newNode(t, one(func(ctx context.Context, s agent.Step) (agent.Effects, error) {
				if s.Input.ID == "x" {
					asked++
					return agent.Effects{}, c.err
				}
				if s.Attempt != 1 || s.Number != 1 || s.LastError != "" {
					t.Errorf("the next input comes as step %d, attempt %d, last error %q", s.Number, s.Attempt, s.LastError)
				}
				return scripted(ctx, s)
			}), o)
			n.send("a", "r", "x", "{}")
			n.send("a", "r", "y", "{}")
			n.settle()
			n.mustBe("r", "idle", "1")
			if asked != c.attempts {
				t.Errorf("%d attempts, want %d", asked, c.attempts)
			}
			if got := n.value("SELECT reason FROM inbox WHERE outcome = 'dead' AND input_id = 'x' AND ended_us > 0"); !strings.Contains(got, "broken") {
				t.Errorf("dead letter with reason %q", got)
			}
		})
	}
	// A step without input has none to set aside.
	o := quick
	o.DeadLetter, o.MaxAttempts = true, 2
	n := newNode(t, one(func(_ context.Context, s agent.Step) (agent.Effects, error) {
		if s.Input != nil {
			return agent.Effects{Next: agent.Continue}, nil
		}
		return agent.Effects{}, errors.New("broken")
	}), o)
	n.send("a", "r", "x", "{}")
	n.settle()
	n.mustBe("r", "paused", "null")
}

func TestBusyAgentIsAskedAgainAndNothingCounts(t *testing.T) {
	n := newNode(t, one(failing(1, func(s agent.Step) error { return &agent.Error{Code: agent.Busy, RetryAfter: time.Hour} })), quick)
	n.send("a", "r", "x", "{}")
	const hour = int64(time.Hour / time.Microsecond)
	for range 20 {
		before := n.store.SteadyUS()
		n.settle()
		after := n.store.SteadyUS()
		var wake int64
		if err := n.store.Get(t.Context(), "SELECT COALESCE(wake_us, 0) FROM run", nil, &wake); err != nil {
			t.Fatal(err)
		}
		if d := n.show("r"); d.Status != "waiting" || d.Attempts != 0 || wake < before+hour || wake > after+hour {
			t.Fatalf("run %+v, wakes %s after it was asked", d.RunInfo, time.Duration(wake-before)*time.Microsecond)
		}
		n.exec("UPDATE run SET wake_us = 1")
	}
}

func TestSlowStepIsEndedAtItsDeadline(t *testing.T) {
	o := quick
	o.StepDeadline, o.MaxAttempts = 50*time.Millisecond, 2
	n := newNode(t, one(func(ctx context.Context, s agent.Step) (agent.Effects, error) {
		if d, ok := ctx.Deadline(); !ok || !d.Equal(s.Deadline) || s.Deadline.Sub(s.Now) != o.StepDeadline || s.Now.Location() != time.UTC {
			t.Errorf("step from %s to %s, context until %s", s.Now, s.Deadline, d)
		}
		<-ctx.Done()
		return agent.Effects{State: []byte("1")}, nil // an answer after its time
	}), o)
	n.send("a", "r", "x", "{}")
	n.settle()
	n.mustBe("r", "paused", "null")
	if d := n.show("r"); !strings.Contains(d.LastError, "deadline") {
		t.Errorf("last error %q", d.LastError)
	}
}

func TestBackoffGrowsWithinItsBounds(t *testing.T) {
	for _, least := range []time.Duration{1, time.Second, 1<<39 + 1, 5 * time.Minute} {
		for attempt, want := range map[int64]time.Duration{1: least, 2: 2 * least, 3: 4 * least, 26: 1 << 62, 33: 1 << 62, 34: 1 << 62, 63: 1 << 62, 64: 1 << 62, 65: 1 << 62, 1e6: 1 << 62} {
			if attempt > 3 && least == 1 && attempt < 60 {
				want = 1 << (attempt - 1)
			}
			want = min(want, 20*time.Minute)
			most := time.Duration(0)
			for range 200 {
				d := backoff(least, 20*time.Minute, attempt)
				if d <= 0 || d > want {
					t.Fatalf("attempt %d from %s: %s, want at most %s", attempt, least, d, want)
				}
				most = max(most, d)
			}
			if most < want/2 {
				t.Errorf("attempt %d from %s: at most %s of %s in 200", attempt, least, most, want)
			}
		}
	}
}

// However its agents fail, Run goes on.
func TestRunNeverEndsByAnAgentsFault(t *testing.T) {
	n := newNode(t, map[string]agent.Agent{
		"a": agent.Func(scripted),
		"panics": agent.Func(func(_ context.Context, s agent.Step) (agent.Effects, error) {
			panic(s)
		}),
		"errs":    agent.Func(func(context.Context, agent.Step) (agent.Effects, error) { return agent.Effects{}, context.Canceled }),
		"invalid": agent.Func(func(context.Context, agent.Step) (agent.Effects, error) { return agent.Effects{Next: "?"}, nil }),
		"nil":     agent.Func(nil),
	}, quick)
	n.start(t)
	for name := range n.agents {
		for i := range 5 {
			n.send(name, fmt.Sprint(name, i), "", "{}")
		}
	}
	n.Wake()
	eventually(t, "healthy and poison runs", func() bool {
		return n.value("SELECT count(*) FROM run WHERE status = 'paused'") == "20" && n.value("SELECT count(*) FROM run WHERE status = 'idle'") == "5"
	})
	n.send("a", "later", "", "{}")
	n.Wake()
	eventually(t, "a later run", func() bool { return n.show("later").Step == 1 })
}

func TestInputOfAnotherProcessIsFoundByThePoll(t *testing.T) {
	n := newNode(t, one(scripted), quick)
	n.start(t)
	other := n.second(t)
	if _, err := Submit(t.Context(), other, Input{Tenant: "d", Agent: "a", Run: "r", Type: "t", Data: []byte("{}")}); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the step", func() bool { return n.show("r").Step == 1 })
}

// In a bubble the grace ends only when nobody has anything left to do, however slow the machine is.
func TestShutdownEndsStepsInHandAndGivesBackTheRest(t *testing.T) {
	synctest.Test(t, shutdownEndsSteps)
}

func shutdownEndsSteps(t *testing.T) {
	o := quick
	o.Grace = time.Second
	entered, leave := make(chan string, 10), make(chan struct{})
	n := newNode(t, one(func(ctx context.Context, s agent.Step) (agent.Effects, error) {
		entered <- s.Run
		if s.Run == "slow" {
			<-ctx.Done()
			return agent.Effects{}, ctx.Err()
		}
		<-leave
		return scripted(ctx, s)
	}), o)
	n.send("a", "slow", "x", "{}")
	n.send("a", "quick", "x", "{}")
	n.send("a", "quick", "y", "{}")
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- n.Run(ctx) }()
	receive(t, "a step", entered)
	receive(t, "a step", entered)
	cancel()
	eventually(t, "Run notices", n.ending.Load)
	close(leave)
	if err := receive(t, "end of Run", done); err != nil {
		t.Errorf("Run: %v", err)
	}
	if d := n.show("quick"); d.Step != 1 || d.Status != "ready" || d.Pending != 1 {
		t.Errorf("the step in hand was to end and no other to begin: %+v", d.RunInfo)
	}
	if d := n.show("slow"); d.Step != 0 || d.Status != "ready" || d.Attempts != 0 || d.LastError != "" {
		t.Errorf("the slow step was to be given back untouched: %+v", d.RunInfo)
	}
	if got := testutil.ToFloat64(n.m.steps.WithLabelValues("a", "stopped")); got != 1 {
		t.Errorf("%g steps are counted as stopped", got)
	}
	// The next life goes on.
	n.restart(t, one(scripted), quick)
	n.settle()
	n.mustBe("slow", "idle", "1")
	n.mustBe("quick", "idle", "2")
}

func TestNextProcessTakesStepsThatWereInHand(t *testing.T) {
	n := newNode(t, one(scripted), quick)
	prepare(n)
	c, plan := n.claimed(t)
	n.restart(t, one(scripted), quick) // without a word
	n.settle()
	n.mustBe("r", "idle", "")
	if got := strings.Join(n.stepInputs("r")[:3], " "); got != "first busy last" {
		t.Errorf("steps had inputs %s", got)
	}
	// What the dead process would still write changes nothing.
	before := dump(t, n.store, false)
	err := n.store.Write(t.Context(), func(ctx context.Context, tx *sqlite.Tx) error {
		_, err := commitStep(ctx, tx, c, plan, false, 10)
		return err
	})
	if !errors.Is(err, errFenced) {
		t.Errorf("late step: %v, want errFenced", err)
	}
	for name, unit := range map[string]sqlite.Unit{
		"failure": func(ctx context.Context, tx *sqlite.Tx) error { return failStep(ctx, tx, c, verdict{status: "paused"}) },
		"retry": func(ctx context.Context, tx *sqlite.Tx) error {
			return failStep(ctx, tx, c, verdict{status: "waiting", wakeUS: 1})
		},
		"give back": func(ctx context.Context, tx *sqlite.Tx) error { return giveBack(ctx, tx, c) },
	} {
		if err := n.store.Write(t.Context(), unit); !errors.Is(err, errFenced) {
			t.Errorf("late %s: %v, want errFenced", name, err)
		}
	}
	mustEqual(t, "after late results", dump(t, n.store, false), before)
}

func TestUnhostedRunWaitsForItsAgent(t *testing.T) {
	n := newNode(t, map[string]agent.Agent{"a": agent.Func(scripted), "b": agent.Func(scripted)}, quick)
	n.send("b", "r", "x", "{}")
	n.send("a", "other", "x", "{}")
	n.restart(t, one(scripted), quick)
	n.settle()
	n.mustBe("r", "unhosted", "null")
	n.mustBe("other", "idle", "1")
	n.send("b", "r", "y", "{}") // known, so taken
	n.settle()
	n.mustBe("r", "unhosted", "null")
	n.restart(t, map[string]agent.Agent{"b": agent.Func(scripted)}, quick)
	n.settle()
	n.mustBe("r", "idle", "2")
}

// An input may end outside any step while a step has it in hand: the step changes nothing, and the run goes on.
func TestStepWhoseInputIsGoneChangesNothing(t *testing.T) {
	var n *node
	n = newNode(t, one(func(ctx context.Context, s agent.Step) (agent.Effects, error) {
		if s.Input.ID == "x" {
			n.exec("UPDATE inbox SET ended_us = 1, outcome = 'withdrawn' WHERE input_id = 'x'")
		}
		return scripted(ctx, s)
	}), quick)
	n.send("a", "r", "x", `{"events": [{"type": "late"}]}`)
	n.send("a", "r", "y", `{}`)
	n.settle()
	n.mustBe("r", "idle", "1")
	if got := n.stepInputs("r"); len(got) != 1 || got[0] != "y" || len(n.exported("r")) != 1 {
		t.Errorf("steps had inputs %v, records %v", got, n.exported("r"))
	}
}

// A store that refuses a step for a while delays it and no more.
func TestStepIsTakenAgainWhenTheStoreRefusedIt(t *testing.T) {
	var faults atomic.Int64
	n := newNode(t, one(scripted), quick)
	n.before = func(q string) error {
		if strings.HasPrefix(q, "INSERT INTO checkpoint") && strings.Contains(q, "codec") && faults.Load() > 0 {
			faults.Add(-1)
			return errors.New("disk is full")
		}
		return nil
	}
	n.send("a", "r", "x", `{"events": [{"type": "e"}]}`)
	faults.Store(2)
	n.start(t)
	eventually(t, "the step", func() bool { return n.show("r").Status == "idle" })
	n.mustBe("r", "idle", "1")
	if got := strings.Join(n.exported("r"), ", "); got != "1 postrider.run.started, 2 e" {
		t.Errorf("records %s", got)
	}
	if got := testutil.ToFloat64(n.m.steps.WithLabelValues("a", "error")); got != 2 {
		t.Errorf("%g steps are counted as errors, want 2", got)
	}
}

func TestMetricsAreWellFormedAndTrue(t *testing.T) {
	reg := prometheus.NewPedanticRegistry()
	o := quick
	o.Metrics, o.MaxAttempts = reg, 2
	n := newNode(t, one(func(ctx context.Context, s agent.Step) (agent.Effects, error) {
		if s.Input.Type == "t" {
			return scripted(ctx, s)
		}
		return agent.Effects{}, errors.New("broken")
	}), o)
	reg.MustRegister(n.Executor)
	n.send("a", "ok", "", `{"commands": [{"type": "t", "in": "1h"}]}`)
	n.send("a", "bad", "", `{"commands": [{"type": "poison", "data": {}}, {"run": "ok", "type": "t", "id": "x", "data": {}}, {"run": "ok", "type": "t", "id": "x"}]}`)
	n.settle()
	problems, err := testutil.GatherAndLint(reg)
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range problems {
		t.Errorf("%s: %s", p.Metric, p.Text)
	}
	want := `
# HELP postrider_inbox_dead Dead letters of the inbox.
# TYPE postrider_inbox_dead gauge
postrider_inbox_dead 1
# HELP postrider_inbox_pending Inputs that wait, timers among them.
# TYPE postrider_inbox_pending gauge
postrider_inbox_pending 2
# HELP postrider_runs Runs by status.
# TYPE postrider_runs gauge
postrider_runs{status="done"} 0
postrider_runs{status="failed"} 0
postrider_runs{status="idle"} 0
postrider_runs{status="paused"} 1
postrider_runs{status="ready"} 0
postrider_runs{status="running"} 0
postrider_runs{status="unhosted"} 0
postrider_runs{status="waiting"} 1
# HELP postrider_steps_total Attempts at steps, by agent and outcome.
# TYPE postrider_steps_total counter
postrider_steps_total{agent="a",outcome="dead"} 0
postrider_steps_total{agent="a",outcome="error"} 0
postrider_steps_total{agent="a",outcome="fenced"} 0
postrider_steps_total{agent="a",outcome="ok"} 3
postrider_steps_total{agent="a",outcome="paused"} 1
postrider_steps_total{agent="a",outcome="stopped"} 0
postrider_steps_total{agent="a",outcome="waiting"} 1
`
	err = testutil.GatherAndCompare(reg, strings.NewReader(want), "postrider_inbox_dead", "postrider_inbox_pending", "postrider_runs", "postrider_steps_total")
	if err != nil {
		t.Error(err)
	}
}
