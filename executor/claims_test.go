package executor

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"

	"postrider/internal/agent"
	"postrider/internal/sqlite"
)

// takeInHand claims the next step of a run under h, and leaves it there.
func (n *node) takeInHand(run string, h hand) *claim {
	n.t.Helper()
	id, err := strconv.ParseInt(n.value("SELECT id FROM run WHERE name = ?", run), 10, 64)
	if err != nil {
		n.t.Fatalf("%v", err)
	}
	var c *claim
	n.write(func(ctx context.Context, tx *sqlite.Tx) (err error) {
		c, err = claimStep(ctx, tx, id, n.hosted, h)
		return err
	})
	if c == nil {
		n.t.Fatalf("run %s has nothing to do", run)
	}
	return c
}

// stands is what a run's row says of its step: its status, whether it waits for its turn, and its failed attempts.
func (n *node) stands(run string) string {
	n.t.Helper()
	return n.value("SELECT status || iif(status = 'running' AND claim_alone IS NULL, ', waits', '') || ', ' || attempts FROM run WHERE name = ?", run)
}

func TestAnEndCountsOnlyAgainstAStepThatWasAlone(t *testing.T) {
	const alone, beside = true, false
	boot := func(n *node, alone bool) hand { return hand{alone, n.boot} }
	for name, c := range map[string]struct {
		before func(n *node)
		a, b   string // how the runs stand then
	}{
		"alone":            {func(n *node) { n.takeInHand("a", boot(n, alone)) }, "running, waits, 1", "ready, 0"},
		"beside another":   {func(n *node) { n.takeInHand("a", boot(n, alone)); n.takeInHand("b", boot(n, beside)) }, "running, waits, 0", "running, waits, 0"},
		"the other is out": {func(n *node) { n.takeInHand("a", boot(n, beside)) }, "running, waits, 0", "ready, 0"},
		"another boot":     {func(n *node) { n.takeInHand("a", hand{alone, "before"}) }, "ready, 0", "ready, 0"},
		"an old database": {func(n *node) {
			n.takeInHand("a", boot(n, alone))
			n.exec("UPDATE run SET claim_alone = NULL, claim_boot = NULL")
		}, "ready, 0", "ready, 0"},
		"given back": {func(n *node) {
			c := n.takeInHand("a", boot(n, alone))
			n.write(func(ctx context.Context, tx *sqlite.Tx) error { return giveBack(ctx, tx, c) })
		}, "ready, 0", "ready, 0"},
		"an end in order began": {func(n *node) {
			n.takeInHand("a", boot(n, alone))
			n.disclaim(context.Background())
		}, "running, waits, 0", "ready, 0"},
		"in its turn, while another waits": {func(n *node) {
			n.takeInHand("a", boot(n, alone))
			n.takeInHand("b", boot(n, beside))
			if err := n.recover(context.Background()); err != nil {
				n.t.Fatalf("%v", err)
			}
			n.takeInHand("b", boot(n, alone))
		}, "running, waits, 0", "running, waits, 1"},
		"all wait, nothing is in hand": {func(n *node) {
			n.takeInHand("a", boot(n, alone))
			n.takeInHand("b", boot(n, beside))
			if err := n.recover(context.Background()); err != nil {
				n.t.Fatalf("%v", err)
			}
		}, "running, waits, 0", "running, waits, 0"},
		"all wait, then the power is cut": {func(n *node) {
			n.takeInHand("a", boot(n, alone))
			n.takeInHand("b", boot(n, beside))
			n.exec("UPDATE run SET claim_alone = NULL, claim_boot = 'before'")
		}, "ready, 0", "ready, 0"},
		"the next step of a run": {func(n *node) {
			n.send("a", "a", "2", "{}")
			c := n.takeInHand("a", boot(n, beside))
			c.hand = boot(n, alone) // by now
			n.commit(c, false)
		}, "running, waits, 1", "ready, 0"},
	} {
		t.Run(name, func(t *testing.T) {
			n := newNode(t, one(scripted), quick)
			n.send("a", "a", "1", "{}")
			n.send("a", "b", "1", "{}")
			c.before(n)
			n.restart(t, n.agents, quick)
			if a, b := n.stands("a"), n.stands("b"); a != c.a || b != c.b {
				t.Errorf("a: %s, b: %s; want %s and %s", a, b, c.a, c.b)
			}
			if strings.HasSuffix(c.a, "1") && n.show("a").LastError != errEnded.Error() {
				t.Errorf("last error: %q", n.show("a").LastError)
			}
			if got, want := n.turns.on, strings.Contains(c.a+c.b, "waits"); got != want {
				t.Errorf("turns are taken: %v", got)
			}
			n.settle()
			if a, b := n.stands("a"), n.stands("b"); a != "idle, 0" || b != "idle, 0" {
				t.Errorf("in the end: a: %s, b: %s", a, b)
			}
		})
	}
}

// A step that ends its process again and again is set aside after its last attempt, as one is whose agent fails.
func TestAStepThatEndsItsNodeIsExhausted(t *testing.T) {
	for name, c := range map[string]struct {
		first      string // fail: an agent's failure; continue: a step before it, so that it has no input
		deadLetter bool
		end        string
	}{
		"paused":                           {"", false, "paused, 3"},
		"dead letter":                      {"", true, "ready, 0"},
		"paused, as there is no input":     {"continue", true, "paused, 3"},
		"paused, as no input is to blame":  {"continue", false, "paused, 3"},
		"paused with failures of its own":  {"fail", false, "paused, 3"},
		"dead letter, failures of its own": {"fail", true, "ready, 0"},
	} {
		t.Run(name, func(t *testing.T) {
			reg := prometheus.NewRegistry()
			o := Options{MaxAttempts: 3, BackoffMin: 1, BackoffMax: 1, DeadLetter: c.deadLetter, Metrics: reg}
			n := newNode(t, one(scripted), o)
			next := "wait"
			if c.first == "continue" {
				next = c.first
			}
			n.send("a", "r", "1", `{"events": [{"type": "e"}], "next": "`+next+`"}`)
			ends := 3
			if c.first == "fail" {
				cl := n.takeInHand("r", n.hand())
				v := n.judge(cl, errors.New("broken"))
				n.write(func(ctx context.Context, tx *sqlite.Tx) error { return failStep(ctx, tx, cl, v) })
				ends = 2
			}
			if c.first == "continue" {
				n.commit(n.takeInHand("r", n.hand()), true)
			}
			for range ends {
				if !strings.Contains(n.stands("r"), "waits") && strings.HasPrefix(n.stands("r"), "running") {
					t.Fatalf("in hand: %s", n.stands("r"))
				}
				eventually(t, "the run can be claimed", func() bool {
					return n.value("SELECT 1 FROM run WHERE name = 'r' AND (status = 'running' OR wake_us <= ?)", n.store.SteadyUS()) == "1"
				})
				n.takeInHand("r", n.hand())
				o.Metrics = prometheus.NewRegistry()
				n.restart(t, n.agents, o)
			}
			if got := n.stands("r"); got != c.end {
				t.Errorf("the run is %s", got)
			}
			d := n.show("r")
			if d.LastError != errEnded.Error() {
				t.Errorf("last error: %q", d.LastError)
			}
			if paused := strings.HasPrefix(c.end, "paused"); paused != slices.ContainsFunc(n.exported("r"), func(s string) bool {
				return strings.HasSuffix(s, "postrider.run.paused")
			}) {
				t.Errorf("exported: %v", n.exported("r"))
			}
			want := ""
			if c.deadLetter && c.first != "continue" {
				want = "dead: " + errEnded.Error()
			}
			if got := n.value("SELECT outcome || ': ' || reason FROM inbox WHERE outcome IS NOT NULL"); got != want {
				t.Errorf("the input is %q", got)
			}
			outcome := "paused"
			if want != "" {
				outcome = "dead"
			}
			if got := testutil.ToFloat64(n.m.steps.WithLabelValues("a", outcome)); got != 1 {
				t.Errorf("%v steps are counted as %s", got, outcome)
			}
			n.send("a", "other", "1", "{}")
			n.settle()
			if n.show("other").Step != 1 {
				t.Error("another run does not go on")
			}
		})
	}
}

// gauge is an agent that knows what it has in hand, and holds each step until let go.
type gauge struct {
	mu      sync.Mutex
	started []string // runs
	inHand  int
	most    int
	held    map[string]chan struct{}
	deaf    bool // to the end of a step's context
}

func (g *gauge) hold(run string) (leave func()) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.held == nil {
		g.held = map[string]chan struct{}{}
	}
	c := make(chan struct{})
	g.held[run] = c
	return sync.OnceFunc(func() { close(c) })
}

func (g *gauge) Step(ctx context.Context, s agent.Step) (agent.Effects, error) {
	g.mu.Lock()
	g.started = append(g.started, s.Run)
	g.inHand++
	g.most = max(g.most, g.inHand)
	held := g.held[s.Run]
	g.mu.Unlock()
	defer func() {
		g.mu.Lock()
		g.inHand--
		g.mu.Unlock()
	}()
	if held != nil {
		done := ctx.Done()
		if g.deaf {
			done = nil
		}
		select {
		case <-held:
		case <-done:
			return agent.Effects{}, context.Cause(ctx)
		}
	}
	return agent.Effects{State: []byte(strconv.FormatInt(s.Number, 10))}, nil
}

func (g *gauge) seen() (started []string, most int) {
	g.mu.Lock()
	defer g.mu.Unlock()
	return slices.Clone(g.started), g.most
}

// suspected is a node whose former process ended with these runs in hand.
func suspected(t *testing.T, g *gauge, o Options, runs ...string) *node {
	t.Helper()
	agents := map[string]agent.Agent{"a": g}
	n := newNode(t, agents, o)
	for _, run := range runs {
		n.send("a", run, "1", "{}")
		n.send("a", run, "2", "{}")
		n.takeInHand(run, hand{false, n.boot})
	}
	n.restart(t, agents, o)
	return n
}

func TestTurnsAreTakenAloneBeforeAnythingElse(t *testing.T) {
	g := &gauge{}
	leave := g.hold("r1")
	var log bytes.Buffer
	n := suspected(t, g, Options{Logger: slog.New(slog.NewTextHandler(&log, nil))}, "r0", "r1", "r2")
	n.exec("UPDATE run SET alone_us = 5 WHERE name = 'r0'") // had its turn after an earlier end
	n.send("a", "fresh", "1", "{}")
	stop := n.start(t)
	eventually(t, "the first turn", func() bool { started, _ := g.seen(); return len(started) == 1 })
	n.send("a", "later", "1", "{}")
	n.Wake()
	if got := n.value("SELECT group_concat(status || COALESCE(claim_alone, ''), ' ') FROM (SELECT * FROM run WHERE name LIKE 'r%' ORDER BY name)"); got != "running running1 running" {
		t.Errorf("in the first turn, runs are %s", got)
	}
	if err := testutil.CollectAndCompare(n.Executor, strings.NewReader(`# HELP postrider_runs Runs by status.
# TYPE postrider_runs gauge
postrider_runs{status="done"} 0
postrider_runs{status="failed"} 0
postrider_runs{status="idle"} 0
postrider_runs{status="paused"} 0
postrider_runs{status="ready"} 4
postrider_runs{status="running"} 1
postrider_runs{status="unhosted"} 0
postrider_runs{status="waiting"} 0
`), "postrider_runs"); err != nil {
		t.Error(err)
	}
	if d := n.show("r2"); d.Status != "ready" {
		t.Errorf("who waits for its turn is shown as %s", d.Status)
	}
	leave()
	eventually(t, "all is done", func() bool { return n.value("SELECT count(*) FROM run WHERE status <> 'idle'") == "0" })
	stop()
	started, _ := g.seen()
	// One step each; then all of it.
	if len(started) != 8 || !slices.Equal(started[:3], []string{"r1", "r2", "r0"}) {
		t.Errorf("steps were taken by %v", started)
	}
	for _, s := range []string{"runs=3", "runs go on side by side"} {
		if !strings.Contains(log.String(), s) {
			t.Errorf("the log lacks %q:\n%s", s, log.String())
		}
	}
}

// Nothing overtakes a turn: the most in hand is one until the last turn is over.
func TestTurnsDoNotOverlap(t *testing.T) {
	g := &gauge{}
	var runs []string
	for i := range 20 {
		runs = append(runs, fmt.Sprint("r", i))
	}
	last := g.hold("r19")
	n := suspected(t, g, Options{}, runs...)
	for i := range 20 {
		n.send("a", fmt.Sprint("fresh", i), "1", "{}")
	}
	n.start(t)
	eventually(t, "the last turn", func() bool { started, _ := g.seen(); return len(started) == 20 })
	if _, most := g.seen(); most != 1 {
		t.Errorf("%d were in hand at once", most)
	}
	last()
	eventually(t, "all is done", func() bool { return n.value("SELECT count(*) FROM run WHERE status <> 'idle'") == "0" })
	if got := n.value("SELECT sum(attempts) FROM run"); got != "0" {
		t.Errorf("%s attempts are counted", got)
	}
}

// A turn that takes too long gets company, and is not cut off.
func TestTurnsEndInTime(t *testing.T) {
	g := &gauge{}
	leave := g.hold("r0")
	n := suspected(t, g, Options{Alone: 30 * time.Millisecond, Poll: 5 * time.Millisecond}, "r0", "r1", "r2")
	n.send("a", "fresh", "1", "{}")
	n.start(t)
	eventually(t, "the others go on", func() bool { return n.value("SELECT count(*) FROM run WHERE status = 'idle'") == "3" })
	if got := n.stands("r0"); got != "running, 0" {
		t.Errorf("the long turn: %s", got)
	}
	leave()
	eventually(t, "it commits", func() bool { return n.show("r0").Step == 2 && n.show("r0").Status == "idle" })
}

// No turn begins after their time, however many wait.
func TestNoTurnBeginsLate(t *testing.T) {
	g := &gauge{}
	n := suspected(t, g, Options{}, "r0", "r1", "r2")
	n.turns.began = time.Now().Add(-time.Hour)
	var wg sync.WaitGroup
	pause, err := n.takeTurn(t.Context(), t.Context(), &wg)
	wg.Wait()
	if err != nil || pause != 0 || n.turns.on {
		t.Errorf("pause %s, error %v, turns go on: %v", pause, err, n.turns.on)
	}
	if got := n.value("SELECT group_concat(DISTINCT status) FROM run"); got != "ready" {
		t.Errorf("runs are %s", got)
	}
}

// Whatever other processes do to a run that waits for its turn, it is not stuck, and nor are the turns.
func TestWhoLeavesTheLineIsNotStuck(t *testing.T) {
	for name, c := range map[string]struct {
		act  func(n *node, other *sqlite.Store)
		want string // how r1 ends
	}{
		"rewound": {func(n *node, other *sqlite.Store) {
			if _, err := Rewind(context.Background(), other, "d", "r1", 0, ""); err != nil {
				n.t.Fatalf("%v", err)
			}
		}, "idle, 0"},
		"its input withdrawn": {func(n *node, other *sqlite.Store) {
			err := other.Write(context.Background(), func(ctx context.Context, tx *sqlite.Tx) error {
				var run, input int64
				if err := tx.Get(ctx, "SELECT id, claim_input FROM run WHERE name = 'r1'", nil, &run, &input); err != nil {
					return err
				}
				if _, _, err := tx.Exec(ctx, "UPDATE inbox SET ended_us = 1, outcome = 'dropped' WHERE id = ?", input); err != nil {
					return err
				}
				return letGo(ctx, tx, run, input)
			})
			if err != nil {
				n.t.Fatalf("%v", err)
			}
		}, "idle, 0"},
		"paused": {func(n *node, other *sqlite.Store) {
			n.exec("UPDATE run SET status = 'paused' WHERE name = 'r1'")
		}, "paused, 0"},
		"more input": {func(n *node, other *sqlite.Store) { n.send("a", "r1", "3", "{}") }, "idle, 0"},
	} {
		t.Run(name, func(t *testing.T) {
			for _, inTurn := range []string{"r0", "r1"} {
				g := &gauge{}
				leave := g.hold(inTurn)
				n := suspected(t, g, Options{Poll: 5 * time.Millisecond}, "r0", "r1", "r2")
				n.start(t)
				eventually(t, "a turn of "+inTurn, func() bool { started, _ := g.seen(); return slices.Contains(started, inTurn) })
				c.act(n, n.second(t))
				leave()
				eventually(t, "all is done", func() bool {
					return n.value("SELECT count(*) FROM run WHERE status NOT IN ('idle', 'paused')") == "0"
				})
				if got := n.stands("r1"); got != c.want {
					t.Errorf("in the turn of %s: r1 is %s", inTurn, got)
				}
			}
		})
	}
}

func TestWhoseAgentIsGoneIsNotStuck(t *testing.T) {
	n := newNode(t, map[string]agent.Agent{"a": agent.Func(scripted), "gone": agent.Func(scripted)}, quick)
	n.send("gone", "g", "1", "{}")
	n.send("gone", "h", "1", "{}")
	n.send("a", "r", "1", "{}")
	n.takeInHand("g", hand{true, n.boot})
	n.takeInHand("h", hand{false, n.boot})
	n.restart(t, one(scripted), quick)
	stop := n.start(t)
	eventually(t, "the others go on", func() bool {
		return n.show("r").Step == 1 && n.stands("g") == "unhosted, 0" && n.stands("h") == "unhosted, 0"
	})
	stop()
	n.restart(t, map[string]agent.Agent{"gone": agent.Func(scripted)}, quick)
	n.start(t)
	eventually(t, "they go on", func() bool { return n.show("g").Step == 1 && n.show("h").Step == 1 })
}

// A step that outlives its timeout, or its process as others know it, while recovery takes its run over: one commit.
func TestAStepThatOutlivesRecoveryChangesNothing(t *testing.T) {
	for name, deadline := range map[string]time.Duration{"late": 20 * time.Millisecond, "in time": time.Hour} {
		t.Run(name, func(t *testing.T) {
			old := &gauge{deaf: true}
			leave := old.hold("r")
			n := newNode(t, map[string]agent.Agent{"a": old}, Options{StepDeadline: deadline, MaxAttempts: 100, BackoffMin: 1, BackoffMax: 1})
			n.send("a", "r", "1", "{}")
			n.start(t)
			eventually(t, "the step is in hand", func() bool { started, _ := old.seen(); return len(started) == 1 })

			next := New(n.second(t), "n1", map[string]agent.Agent{"a": &gauge{}}, quick)
			ctx, cancel := context.WithCancel(t.Context())
			done := make(chan error, 1)
			go func() { done <- next.Run(ctx) }()
			eventually(t, "the next process takes it", func() bool { return n.show("r").Step == 1 })
			leave()
			eventually(t, "the late answer is dropped", func() bool {
				return testutil.ToFloat64(n.m.steps.WithLabelValues("a", "fenced")) == 1
			})
			cancel()
			if err := <-done; err != nil {
				t.Error(err)
			}
			if d := n.show("r"); d.Step != 1 || d.Attempts != 0 || d.Status != "idle" || d.LSN != 1 {
				t.Errorf("the run: %+v", d.RunInfo)
			}
		})
	}
}

// The old process answers while its run waits for its turn: neither a commit nor a failure gets through.
func TestAClaimThatWaitsForItsTurnIsFenced(t *testing.T) {
	n := newNode(t, one(scripted), quick)
	n.send("a", "r", "1", `{"events": [{"type": "e"}]}`)
	c := n.takeInHand("r", n.hand())
	plan := n.plan(c)
	n.takeOver(t)
	before := dump(t, n.store, false)
	for name, unit := range map[string]sqlite.Unit{
		"commit": func(ctx context.Context, tx *sqlite.Tx) error {
			_, err := commitStep(ctx, tx, c, plan, false, 10)
			return err
		},
		"failure": func(ctx context.Context, tx *sqlite.Tx) error {
			return failStep(ctx, tx, c, verdict{status: "waiting"})
		},
		"give back": func(ctx context.Context, tx *sqlite.Tx) error { return giveBack(ctx, tx, c) },
	} {
		if err := n.store.Write(t.Context(), unit); !errors.Is(err, errFenced) {
			t.Errorf("%s: %v", name, err)
		}
		mustEqual(t, name, dump(t, n.store, false), before)
	}
	n.settle()
	n.mustBe("r", "idle", "1")
}

// takeOver is what the next process does first, while this one lives on.
func (n *node) takeOver(t *testing.T) {
	t.Helper()
	if err := New(n.store, "n1", n.agents, quick).recover(t.Context()); err != nil {
		t.Fatal(err)
	}
}

// An agent that does not mind the end of an orderly node does not look as if it had caused it.
func TestAnEndInOrderDoesNotCount(t *testing.T) {
	g := &gauge{deaf: true}
	leave := g.hold("r")
	n := newNode(t, map[string]agent.Agent{"a": g}, Options{Grace: 10 * time.Millisecond})
	n.send("a", "r", "1", "{}")
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- n.Run(ctx) }()
	eventually(t, "the step is in hand", func() bool { return n.value("SELECT claim_alone FROM run") == "1" })
	cancel()
	eventually(t, "it is not said to be alone", func() bool { return n.value("SELECT claim_alone FROM run") == "0" })
	leave()
	if err := receive(t, "the end", done); err != nil {
		t.Error(err)
	}
	if got := n.stands("r"); got != "ready, 0" && got != "idle, 0" {
		t.Errorf("the run is %s", got)
	}
}

// The same in one claim after the other: who has company does not say that it is alone.
func TestClaimsSayWhetherTheyAreAlone(t *testing.T) {
	g := &gauge{}
	var leave []func()
	for i := range 3 {
		leave = append(leave, g.hold(fmt.Sprint("r", i)))
	}
	n := newNode(t, map[string]agent.Agent{"a": g}, Options{})
	n.start(t)
	for i := range 3 {
		run := fmt.Sprint("r", i)
		n.send("a", run, "1", "{}")
		n.send("a", run, "2", "{}")
		n.Wake()
		eventually(t, "it is in hand", func() bool { started, _ := g.seen(); return slices.Contains(started, run) })
	}
	if got := n.value("SELECT group_concat(claim_alone, ' ') FROM (SELECT * FROM run ORDER BY name)"); got != "1 0 0" {
		t.Errorf("alone: %s", got)
	}
	if got := n.value("SELECT group_concat(DISTINCT claim_boot = ?) FROM run", n.store.Boot()); got != "1" {
		t.Errorf("of this boot: %s", got)
	}
	// A run's next step is claimed in the commit of the one before it, and is no longer alone.
	next := g.hold("r0")
	leave[0]()
	eventually(t, "the next step is in hand", func() bool { started, _ := g.seen(); return len(started) == 4 })
	if got := n.value("SELECT claim_alone FROM run WHERE name = 'r0'"); got != "0" {
		t.Errorf("the next step's claim: %s", got)
	}
	next()
	leave[1]()
	eventually(t, "the others end", func() bool { // their workers too, who are what a claim counts
		n.mu.Lock()
		defer n.mu.Unlock()
		return len(n.active) == 1
	})
	next = g.hold("r2")
	leave[2]()
	eventually(t, "the last one is in hand", func() bool { return n.value("SELECT claim_alone FROM run WHERE status = 'running'") == "1" })
	next()
}

// A fault before any statement of recovery, of a turn's claim or of the turns' end leaves nothing of it behind.
func TestFaultBetweenAnyTwoStatementsOfRecoveryLeavesNothing(t *testing.T) {
	fault := errors.New("fault")
	for name, act := range map[string]struct {
		alone bool
		o     Options
		unit  func(n *node) error
	}{
		"recovery":             {false, quick, func(n *node) error { return n.recover(context.Background()) }},
		"recovery that counts": {true, quick, func(n *node) error { return n.recover(context.Background()) }},
		"recovery that pauses": {true, Options{MaxAttempts: 1}, func(n *node) error { return n.recover(context.Background()) }},
		"recovery that buries": {true, Options{MaxAttempts: 1, DeadLetter: true}, func(n *node) error { return n.recover(context.Background()) }},
		"end of the turns": {false, Options{Alone: 1}, func(n *node) error {
			_, err := n.takeTurn(context.Background(), context.Background(), nil)
			return err
		}},
	} {
		t.Run(name, func(t *testing.T) {
			n := newNode(t, one(scripted), act.o)
			n.send("a", "r0", "1", "{}")
			n.send("a", "r1", "1", "{}")
			n.takeInHand("r0", hand{act.alone, n.boot})
			if !act.alone {
				n.takeInHand("r1", hand{false, n.boot})
			}
			if strings.HasPrefix(name, "end") {
				n.takeOver(t)
				n.turns = turns{on: true, began: time.Now().Add(-time.Second)}
			}
			before := dump(t, n.store, false)
			k := 1
			for ; ; k++ {
				i := 0
				n.before = func(string) error {
					if i++; i == k {
						return fault
					}
					return nil
				}
				err := act.unit(n)
				n.before = nil
				if err == nil {
					break
				}
				if !errors.Is(err, fault) {
					t.Fatalf("at statement %d: %v", k, err)
				}
				mustEqual(t, fmt.Sprintf("fault at statement %d", k), dump(t, n.store, false), before)
			}
			t.Logf("%d statements", k-1)
			if k < 2 {
				t.Error("no statement failed")
			}
			n.exec("UPDATE run SET status = 'ready', wake_us = 0 WHERE status = 'paused'")
			n.settle()
			if got := n.value("SELECT count(*) FROM run WHERE status = 'idle'"); got != "2" {
				t.Errorf("%s of 2 runs come to rest", got)
			}
		})
	}
}

// child runs this test binary as a node on n's database until it settles or dies, with the settings as environment.
func (n *node) child(t *testing.T, env ...string) (died bool) {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), os.Args[0])
	cmd.Env = append(append(os.Environ(), "POSTRIDER_TEST_NODE="+n.path), env...)
	out, err := cmd.CombinedOutput()
	var exit *exec.ExitError
	switch {
	case err == nil:
		return false
	case !errors.As(err, &exit) || exit.Sys().(syscall.WaitStatus).Signal() != syscall.SIGKILL:
		t.Fatalf("child: %v\n%s", err, out)
	}
	return true
}

func kill() {
	if err := syscall.Kill(os.Getpid(), syscall.SIGKILL); err != nil {
		panic(err)
	}
	select {}
}

// childNode is that node. Its agent kills the process in run "poison"; with TOGETHER, once that many steps are in hand,
// none of which ends before; with LAST, once all others rest; with VICTIM, also in that run. With AT, the
// process dies before that statement.
func childNode(path string) {
	number := func(name string) int64 {
		i, err := strconv.ParseInt(cmp.Or(os.Getenv(name), "0"), 10, 64)
		if err != nil {
			panic(err)
		}
		return i
	}
	together, at := number("TOGETHER"), number("AT")
	var inHand, statements atomic.Int64
	all := make(chan struct{})
	n := &node{t: failNow{}}
	decide := agent.Func(func(ctx context.Context, s agent.Step) (agent.Effects, error) {
		if together > 0 {
			if inHand.Add(1) == together {
				close(all)
			}
			<-all
		}
		switch {
		case s.Run == "poison" && os.Getenv("LAST") != "":
			eventually(n.t, "all others rest", func() bool { return n.value("SELECT count(*) FROM run WHERE status <> 'idle'") == "1" })
			kill()
		case s.Run == "poison", s.Run == os.Getenv("VICTIM"):
			kill()
		case together > 0:
			<-ctx.Done()
			return agent.Effects{}, context.Cause(ctx)
		}
		return agent.Effects{State: []byte(strconv.FormatInt(s.Number, 10)), Events: []agent.Event{{Type: "e"}}}, nil
	})
	store, err := sqlite.Open(context.Background(), path, sqlite.NodeSchema(schemaText(), "n1", path), sqlite.Options{
		Clocks: sqlite.Clocks{Boot: os.Getenv("BOOT")},
		BeforeStatement: func(string) error {
			if statements.Add(1) == at {
				kill()
			}
			return nil
		}})
	if err != nil {
		panic(err)
	}
	n.Executor = New(store, "n1", one(decide), Options{DeadLetter: os.Getenv("DEAD_LETTER") != "", Poll: 2 * time.Millisecond})
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- n.Run(ctx) }()
	eventually(n.t, "the node settles", func() bool {
		return n.Health() == nil && n.value("SELECT count(*) FROM run WHERE status NOT IN ('idle', 'paused')") == "0"
	})
	cancel()
	if err := errors.Join(<-done, store.Close()); err != nil {
		panic(err)
	}
	os.Exit(0)
}

// poisoned is a node that is not running, with 64 runs that have an input each, one of which kills its process.
func poisoned(t *testing.T) *node {
	t.Helper()
	n := newNode(t, one(scripted), quick)
	for i := range 64 {
		run := fmt.Sprint("r", i)
		if i == 40 {
			run = "poison"
		}
		n.send("a", run, "1", "{}")
	}
	return n
}

// healthyOnce holds that the 63 others have taken their step once, and that nothing counts against them.
func (n *node) healthyOnce() {
	n.t.Helper()
	got := n.value(`SELECT count(*) || ' runs, ' || count(DISTINCT i.id) || ' inputs, ' || sum(b.head_lsn) || ' records'
		FROM run r JOIN branch b ON b.id = r.live JOIN inbox i ON i.run = r.id AND i.consumed_branch = b.id AND i.consumed_step = 1
		WHERE r.name <> 'poison' AND r.status = 'idle' AND r.attempts = 0 AND b.head_step = 1 AND i.outcome IS NULL`)
	if got != "63 runs, 63 inputs, 126 records" {
		n.t.Errorf("of the healthy: %s", got)
	}
}

// An input that kills its process ends paused, or as a dead letter, after its attempts; the 63 that are in hand with it
// are decided once each, and nothing counts against them.
func TestPoisonInputAmong64(t *testing.T) {
	for name, c := range map[string]struct {
		deadLetter, poison, input string
		victim                    string // of another kill, in its turn
		deaths                    int    // with all in hand, each attempt, and that one
	}{
		"paused":                             {"", "paused, 5", "", "", 6},
		"dead letter":                        {"1", "idle, 0", "dead: " + errEnded.Error(), "", 6},
		"killed again between the turns":     {"", "paused, 5", "", "r20", 7},
		"killed again by the last one":       {"1", "idle, 0", "dead: " + errEnded.Error(), "r63", 7},
		"killed again by the very first one": {"", "paused, 5", "", "r0", 7},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			n := poisoned(t)
			deaths := 0
			for env := []string{"TOGETHER=64"}; n.child(t, append(env, "DEAD_LETTER="+c.deadLetter)...); {
				if deaths++; deaths > 20 {
					t.Fatal("the node does not come to rest")
				}
				env = []string{}
				if c.victim != "" && n.value("SELECT alone_us FROM run WHERE name = ?", c.victim) == "" {
					env = append(env, "VICTIM="+c.victim)
				}
			}
			if deaths != c.deaths {
				t.Errorf("%d deaths, want %d", deaths, c.deaths)
			}
			n.healthyOnce()
			if got := n.stands("poison"); got != c.poison {
				t.Errorf("the poison is %s", got)
			}
			if got := n.value("SELECT outcome || ': ' || reason FROM inbox WHERE run_name = 'poison'"); got != c.input {
				t.Errorf("its input is %q", got)
			}
			if got := n.show("poison").LastError; got != errEnded.Error() {
				t.Errorf("its last error is %q", got)
			}
			if n.child(t) {
				t.Error("the node dies again")
			}
		})
	}
}

// After power cuts nothing is suspected, however often one finds the same step in hand, and alone.
func TestPowerCutsCountAgainstNobody(t *testing.T) {
	t.Parallel()
	n := poisoned(t)
	for i := range 8 {
		env := []string{"BOOT=" + strconv.Itoa(i)}
		if i == 0 {
			env = append(env, "TOGETHER=64")
		} else {
			env = append(env, "LAST=1")
		}
		if !n.child(t, env...) {
			t.Fatal("the node settled")
		}
		if got := n.value("SELECT group_concat(name) FROM run WHERE attempts > 0 OR status IN ('paused', 'failed')"); got != "" {
			t.Fatalf("after %d power cuts it counts against %s", i+1, got)
		}
	}
	if got := n.value("SELECT count(*) FROM inbox WHERE outcome IS NOT NULL"); got != "0" {
		t.Errorf("%s inputs were set aside", got)
	}
	if got := n.stands("poison"); got != "running, 0" {
		t.Errorf("the poison is %s", got)
	}
	n.healthyOnce()
}

// A process that is killed before any statement of recovery and of the turns, by somebody else, is followed by one that
// ends as if nothing had been: each step is taken once.
func TestKillBetweenAnyTwoStatementsOfTheTurns(t *testing.T) {
	t.Parallel()
	template := newNode(t, one(scripted), quick)
	for _, run := range []string{"r0", "r1", "r2"} {
		template.send("a", run, "1", "{}")
		template.takeInHand(run, hand{false, template.boot})
	}
	if err := template.store.Close(); err != nil { // which folds the WAL into the file
		t.Fatal(err)
	}
	image, err := os.ReadFile(template.path)
	if err != nil {
		t.Fatal(err)
	}
	var most int
	for k := 1; ; k++ {
		n := &node{t: t, path: filepath.Join(t.TempDir(), "node.db")}
		if err := os.WriteFile(n.path, image, 0o600); err != nil {
			t.Fatal(err)
		}
		died := n.child(t, "AT="+strconv.Itoa(k))
		if died && n.child(t) {
			t.Fatalf("killed at statement %d: the next process dies", k)
		}
		n.Executor = New(openStore(t, n.path, nil), "n1", one(scripted), quick)
		if got := n.value(`SELECT group_concat(r.status || r.attempts || b.head_step || b.head_lsn) FROM run r JOIN branch b ON b.id = r.live`); got != "idle012,idle012,idle012" {
			t.Errorf("killed at statement %d: in the end %s", k, got)
		}
		if err := n.store.Close(); err != nil {
			t.Fatal(err)
		}
		if most = k; !died {
			break
		}
	}
	if t.Logf("%d statements", most-1); most < 40 {
		t.Errorf("only %d statements", most-1)
	}
}

// No number of attempts and no bounds make a pause overflow, none is longer than its cap, and none is next to nothing.
func TestBackoffAtAnyAttempt(t *testing.T) {
	for _, c := range []struct{ least, most time.Duration }{
		{time.Second, 5 * time.Minute}, {1, 1}, {1, math.MaxInt64}, {math.MaxInt64, math.MaxInt64}, {time.Hour, time.Second}, {3, 1 << 62}, {-5, -7}, {0, 0},
	} {
		for _, attempt := range []int64{math.MinInt64, 0, 1, 2, 33, 62, 63, 64, 65, 1e6, math.MaxInt64} {
			limit := max(c.most, 1)
			if least := max(c.least, 1); attempt < 62 && least < limit>>(max(attempt, 1)-1) {
				limit = least << (max(attempt, 1) - 1)
			}
			for range 100 {
				if d := backoff(c.least, c.most, attempt); d <= 0 || d > limit || d < min(c.least, limit)/10 {
					t.Fatalf("attempt %d from %s to %s: %s, want at most %s", attempt, c.least, c.most, d, limit)
				}
			}
		}
	}
}

// However long or short an agent says it is busy, it is asked neither all the time nor never again, and it never counts.
func TestBusyIsBoundedAndNeverCounts(t *testing.T) {
	n := newNode(t, one(scripted), Options{BackoffMin: 20 * time.Millisecond})
	for after, want := range map[time.Duration]time.Duration{
		math.MinInt64: 20 * time.Millisecond, -1: 20 * time.Millisecond, 0: 20 * time.Millisecond, 1: busyMin, time.Minute: time.Minute, math.MaxInt64: 24 * time.Hour,
	} {
		for _, attempt := range []int64{1, 5, 1e6} {
			begin := n.store.SteadyUS()
			v := n.judge(&claim{attempt: attempt}, fmt.Errorf("wrapped: %w", &agent.Error{Code: agent.Busy, RetryAfter: after}))
			end := n.store.SteadyUS()
			if v.status != "waiting" || v.countsAsOf != attempt-1 || v.wakeUS < begin+want.Microseconds() || v.wakeUS > end+want.Microseconds() {
				t.Errorf("retry after %s at attempt %d: %+v, want %s from %d", after, attempt, v, want, begin)
			}
		}
	}
}

// Attempts and the last error are the step's, whichever process makes the next attempt.
func TestAttemptsSurviveRestarts(t *testing.T) {
	var got []string
	agents := one(func(_ context.Context, s agent.Step) (agent.Effects, error) {
		got = append(got, fmt.Sprintf("%d %s", s.Attempt, s.LastError))
		return agent.Effects{}, fmt.Errorf("broken %d", s.Attempt)
	})
	o := Options{MaxAttempts: 3, BackoffMin: time.Hour, BackoffMax: time.Hour}
	n := newNode(t, agents, o)
	n.send("a", "r", "1", "{}")
	for range 5 {
		n.exec("UPDATE run SET wake_us = 0 WHERE status = 'waiting'")
		n.settle()
		n.restart(t, agents, o)
	}
	if want := []string{"1 ", "2 broken 1", "3 broken 2"}; !slices.Equal(got, want) {
		t.Errorf("attempts: %q", got)
	}
	if got := n.stands("r"); got != "paused, 3" {
		t.Errorf("the run is %s", got)
	}
}
