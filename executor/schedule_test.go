package executor

import (
	"context"
	"fmt"
	"runtime"
	"sync/atomic"
	"testing"
	"time"

	"postrider/internal/agent"
)

// bounded takes so many steps at once.
type bounded struct {
	agent.Func
	slots int
}

func (b bounded) Slots() int { return b.slots }

// An agent that hangs, with more runs than there are workers, leaves the others room.
func TestHangingAgentStarvesNoOther(t *testing.T) {
	for name, c := range map[string]struct {
		host func(agent.Func) agent.Agent
		want int64 // of its runs in hand
	}{
		"without a bound of its own": {func(f agent.Func) agent.Agent { return f }, 6}, // of 8 workers, one is kept for each other agent
		"bounded":                    {func(f agent.Func) agent.Agent { return bounded{f, 2} }, 2},
	} {
		t.Run(name, func(t *testing.T) {
			var inHand atomic.Int64
			leave := make(chan struct{})
			hang := agent.Func(func(ctx context.Context, s agent.Step) (agent.Effects, error) {
				inHand.Add(1)
				select {
				case <-leave:
				case <-ctx.Done():
				}
				return agent.Effects{}, nil
			})
			quick := agent.Func(func(context.Context, agent.Step) (agent.Effects, error) { return agent.Effects{}, nil })
			n := newNode(t, map[string]agent.Agent{"hang": c.host(hang), "quick": quick, "idle": quick}, Options{Workers: 8})
			for i := range 40 {
				n.send("hang", fmt.Sprintf("h%d", i), "", "{}")
			}
			n.start(t)
			eventually(t, "the agent hangs", func() bool { return inHand.Load() == c.want })
			for i := range 20 {
				n.send("quick", fmt.Sprintf("q%d", i), "", "{}")
			}
			eventually(t, "the other agent's runs go on", func() bool {
				return n.value("SELECT count(*) FROM run WHERE agent = 'quick' AND status = 'idle'") == "20"
			})
			if got := inHand.Load(); got != c.want {
				t.Errorf("%d runs of the hanging agent are in hand, not %d", got, c.want)
			}
			close(leave)
			eventually(t, "all is done", func() bool { return n.value("SELECT count(*) FROM run WHERE status <> 'idle'") == "0" })
		})
	}
}

// Recorded time may be ahead of the wall clock that was set back: what is due by the former is taken all the same, and
// pauses are measured by it.
func TestClockSetBackStopsNothing(t *testing.T) {
	var failed atomic.Bool
	n := newNode(t, one(func(_ context.Context, s agent.Step) (agent.Effects, error) {
		if !failed.Swap(true) {
			return agent.Effects{}, fmt.Errorf("once")
		}
		return agent.Effects{}, nil
	}), Options{BackoffMin: time.Millisecond, BackoffMax: time.Millisecond})
	n.exec("UPDATE meta SET clock_us = clock_us + 3600000000")
	n.send("a", "r", "1", "{}")
	if _, err := Submit(t.Context(), n.store, Input{Tenant: "d", Agent: "a", Run: "later", Type: "t", Data: []byte("{}"), In: time.Millisecond}); err != nil {
		t.Fatal(err)
	}
	if _, err := Submit(t.Context(), n.store, Input{Tenant: "d", Agent: "a", Run: "much-later", Type: "t", Data: []byte("{}"), In: time.Hour}); err != nil {
		t.Fatal(err)
	}
	n.start(t)
	eventually(t, "both steps are taken", func() bool { return n.show("r").Step == 1 && n.show("later").Step == 1 })
	if d := n.show("much-later"); d.Status != "waiting" {
		t.Errorf("what is due in an hour is %s", d.Status)
	}
}

// An agent that ends its goroutine ends neither the process nor its run.
func TestGoexitInAnAgentReleasesItsRun(t *testing.T) {
	var calls atomic.Int64
	n := newNode(t, one(func(context.Context, agent.Step) (agent.Effects, error) {
		if calls.Add(1) == 1 {
			runtime.Goexit()
		}
		return agent.Effects{}, nil
	}), Options{})
	n.send("a", "r", "1", "{}")
	n.start(t)
	eventually(t, "the step is taken again", func() bool { return n.show("r").Step == 1 })
}

// A command that the last step of a run sends to its own run has no receiver any more.
func TestCommandToTheRunThatEndsIsADeadLetter(t *testing.T) {
	n := newNode(t, one(scripted), Options{})
	n.send("a", "r", "1", `{"commands": [{"type": "t", "id": "c", "data": {}}], "next": "done"}`)
	n.settle()
	d := n.show("r")
	if d.Status != "done" || d.Pending != 0 || d.Step != 1 {
		t.Errorf("%+v", d.RunInfo)
	}
	if got := n.value("SELECT group_concat(reason) FROM inbox WHERE outcome = 'dead'"); got != "the run ended with the step that sent it" {
		t.Errorf("dead letters: %q", got)
	}
}

func TestExpiredCommandIsADeadLetterAndTheNextIsTaken(t *testing.T) {
	n := newNode(t, one(scripted), Options{})
	n.send("a", "r", "1", `{"commands": [{"type": "late", "expires_in": "1us", "in": "2ms", "data": {}}, {"type": "kept", "expires_in": "1h", "in": "3ms", "data": {}}]}`)
	n.settle()
	eventually(t, "the later one is taken", func() bool { n.settle(); return n.show("r").Step == 2 })
	if got := n.value("SELECT group_concat(type || ': ' || reason) FROM inbox WHERE outcome = 'dead'"); got != "late: expired before its step" {
		t.Errorf("dead letters: %q", got)
	}
}
