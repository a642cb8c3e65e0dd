package executor

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"syscall"
	"testing"

	"postrider/internal/agent"
	"postrider/internal/sqlite"
)

// busyStep is a step with everything in it: state, events, a message, a remote and three local commands (to a new run, to
// itself, and one that the receiver cannot take), a cancelled timer, and its end.
const busyStep = `{"state": {"x": 1}, "events": [{"type": "e1"}, {"type": "e2", "data": [1]}],
	"messages": [{"topic": "lamp/set", "text": "ON"}],
	"commands": [{"agent": "a@n2", "run": "far", "type": "t", "id": "far"}, {"run": "new", "type": "t", "data": {}, "id": "c1"},
		{"type": "t", "data": {}}, {"run": "over", "type": "t", "data": {}}],
	"cancel": ["timer"]}`

// prepare brings a node to where busyStep is the next step of run r.
func prepare(n *node) {
	n.send("a", "over", "end", `{"next": "done"}`)
	n.send("a", "r", "first", `{"commands": [{"type": "t", "in": "1h", "id": "timer", "data": {}}], "events": [{"type": "e0"}]}`)
	n.settle()
	n.send("a", "r", "busy", busyStep)
	n.send("a", "r", "last", `{"events": [{"type": "e3"}]}`)
}

// inHand takes the next step of run r in hand.
func (n *node) inHand(t tester) *claim {
	t.Helper()
	var c *claim
	n.write(func(ctx context.Context, tx *sqlite.Tx) (err error) {
		var id int64
		if err := tx.Get(ctx, "SELECT id FROM run WHERE name = 'r'", nil, &id); err != nil {
			return err
		}
		c, err = claimStep(ctx, tx, id, n.hosted, n.hand())
		return err
	})
	if c == nil {
		t.Fatalf("run r has nothing to do")
	}
	return c
}

// plan is what the agent of a claim answers.
func (n *node) plan(c *claim) *effects {
	n.t.Helper()
	step := agent.Step{Number: c.step, Attempt: c.attempt, State: c.state}
	if c.input != nil {
		step.Input = &c.input.Input
	}
	answer, err := n.agents[c.agent].Step(context.Background(), step)
	if err != nil {
		n.t.Fatalf("%v", err)
	}
	plan, err := limits{node: "n1", routes: n.o.Routes, maxRecord: n.o.MaxRecord, hosted: n.hosted}.plan(c, answer, 1, 1)
	if err != nil {
		n.t.Fatalf("%v", err)
	}
	return plan
}

// claimed takes the next step of run r in hand and plans what its agent answers.
func (n *node) claimed(t tester) (*claim, *effects) {
	t.Helper()
	c := n.inHand(t)
	return c, n.plan(c)
}

// paused has run r paused at its next step.
func (n *node) paused() *claim {
	n.t.Helper()
	c, _ := n.claimed(n.t)
	n.write(func(ctx context.Context, tx *sqlite.Tx) error {
		return failStep(ctx, tx, c, verdict{reason: "x", status: "paused", countsAsOf: 5})
	})
	return c
}

// A fault before any statement of a transaction leaves nothing of it behind, and the same transaction then goes through
// as if the fault had not been.
func TestFaultBetweenAnyTwoStatementsLeavesNothing(t *testing.T) {
	fault := errors.New("fault")
	for name, unit := range map[string]func(n *node) sqlite.Unit{
		"step": func(n *node) sqlite.Unit {
			c, plan := n.claimed(n.t)
			return func(ctx context.Context, tx *sqlite.Tx) error {
				_, err := commitStep(ctx, tx, c, plan, false, 10)
				return err
			}
		},
		"step that pauses": func(n *node) sqlite.Unit {
			c, plan := n.claimed(n.t)
			plan.next = agent.Continue
			return func(ctx context.Context, tx *sqlite.Tx) error {
				_, err := commitStep(ctx, tx, c, plan, false, 1)
				return err
			}
		},
		"failure, paused": func(n *node) sqlite.Unit {
			c, _ := n.claimed(n.t)
			return func(ctx context.Context, tx *sqlite.Tx) error {
				return failStep(ctx, tx, c, verdict{reason: "x", status: "paused", countsAsOf: 5})
			}
		},
		"failure, dead letter": func(n *node) sqlite.Unit {
			c, _ := n.claimed(n.t)
			return func(ctx context.Context, tx *sqlite.Tx) error {
				return failStep(ctx, tx, c, verdict{reason: "x", status: "dead", countsAsOf: 5})
			}
		},
		"first input of a run": func(n *node) sqlite.Unit {
			return func(ctx context.Context, tx *sqlite.Tx) error {
				_, _, err := enqueue(ctx, tx, arrival{tenant: "d", run: "fresh", agent: "a", id: "x", explicit: true, typ: "t", source: "cli", data: []byte("{}")})
				return err
			}
		},
		"requeue": func(n *node) sqlite.Unit {
			c, _ := n.claimed(n.t)
			n.write(func(ctx context.Context, tx *sqlite.Tx) error {
				return failStep(ctx, tx, c, verdict{reason: "x", status: "dead", countsAsOf: 5})
			})
			return func(ctx context.Context, tx *sqlite.Tx) error {
				_, err := requeue(ctx, tx, "d", c.input.row, "test")
				return err
			}
		},
		"drop of the input in hand": func(n *node) sqlite.Unit {
			c, _ := n.claimed(n.t)
			return func(ctx context.Context, tx *sqlite.Tx) error {
				_, err := drop(ctx, tx, "d", c.input.row, "test")
				return err
			}
		},
		"drop of the input it is paused at": func(n *node) sqlite.Unit {
			c := n.paused()
			return func(ctx context.Context, tx *sqlite.Tx) error {
				_, err := drop(ctx, tx, "d", c.input.row, "test")
				return err
			}
		},
		"resume": func(n *node) sqlite.Unit {
			n.paused()
			return func(ctx context.Context, tx *sqlite.Tx) error {
				_, err := resume(ctx, tx, "d", "r", "test")
				return err
			}
		},
		"reopen": func(n *node) sqlite.Unit {
			return func(ctx context.Context, tx *sqlite.Tx) error {
				_, err := reopen(ctx, tx, "d", "over", "test")
				return err
			}
		},
		"rewind": func(n *node) sqlite.Unit {
			n.settle()
			return func(ctx context.Context, tx *sqlite.Tx) error {
				_, err := rewind(ctx, tx, "d", "r", 1, "test")
				return err
			}
		},
	} {
		t.Run(name, func(t *testing.T) {
			want := newNode(t, one(scripted), quick)
			prepare(want)
			want.write(unit(want))
			if !t.Run("then goes on", func(t *testing.T) { want.t = t; want.settle() }) {
				return
			}

			n := newNode(t, one(scripted), quick)
			prepare(n)
			u := unit(n)
			before := dump(t, n.store, false)
			for k := 1; ; k++ {
				i := 0
				n.before = func(string) error {
					if i++; i == k {
						return fault
					}
					return nil
				}
				err := n.store.Write(t.Context(), u)
				n.before = nil
				if err == nil {
					if k < 4 {
						t.Fatalf("only %d statements", k-1)
					}
					t.Logf("%d statements", k-1)
					break
				}
				if !errors.Is(err, fault) {
					t.Fatalf("at statement %d: %v", k, err)
				}
				mustEqual(t, fmt.Sprintf("fault at statement %d", k), dump(t, n.store, false), before)
			}
			n.settle()
			mustEqual(t, "in the end", dump(t, n.store, true), dump(t, want.store, true))
		})
	}
}

// killedStep is the child process of the test below: it takes the step in hand and dies before the k-th statement.
func killedStep(path string) {
	at, err := strconv.Atoi(os.Getenv("POSTRIDER_TEST_KILL_AT"))
	if err != nil {
		panic(err)
	}
	armed, i := false, 0
	store, err := sqlite.Open(context.Background(), path, sqlite.NodeSchema(schemaText(), "n1", path), sqlite.Options{BeforeStatement: func(string) error {
		if i++; armed && i == at {
			if err := syscall.Kill(os.Getpid(), syscall.SIGKILL); err != nil {
				panic(err)
			}
			select {}
		}
		return nil
	}})
	if err != nil {
		panic(err)
	}
	n := &node{Executor: New(store, "n1", one(scripted), quick), t: failNow{}}
	c, plan := n.claimed(n.t)
	armed, i = true, 0
	n.write(func(ctx context.Context, tx *sqlite.Tx) error {
		_, err := commitStep(ctx, tx, c, plan, false, 10)
		return err
	})
	if err := store.Close(); err != nil {
		panic(err)
	}
	os.Exit(0) // there are fewer statements
}

type failNow struct{}

func (failNow) Helper()                           {}
func (failNow) Errorf(format string, args ...any) { panic(fmt.Sprintf(format, args...)) }
func (failNow) Fatalf(format string, args ...any) { panic(fmt.Sprintf(format, args...)) }

// A process killed before any statement of a step's transaction has not taken the step; the next one takes it, and the
// run ends as if nothing had been.
func TestKillBetweenAnyTwoStatementsLeavesNothing(t *testing.T) {
	want := newNode(t, one(scripted), quick)
	prepare(want)
	want.claimed(t)
	inHand := dump(t, want.store, true)
	if err := want.recover(t.Context()); err != nil {
		t.Fatal(err)
	}
	want.settle()
	end := dump(t, want.store, true)

	template := newNode(t, one(scripted), quick)
	prepare(template)
	if err := template.store.Close(); err != nil { // which folds the WAL into the file
		t.Fatal(err)
	}
	image, err := os.ReadFile(template.path)
	if err != nil {
		t.Fatal(err)
	}
	for k := 1; ; k++ {
		n := &node{t: t, path: filepath.Join(t.TempDir(), "node.db")}
		if err := os.WriteFile(n.path, image, 0o600); err != nil {
			t.Fatal(err)
		}
		child := exec.CommandContext(t.Context(), os.Args[0])
		child.Env = append(os.Environ(), "POSTRIDER_TEST_KILL="+n.path, "POSTRIDER_TEST_KILL_AT="+strconv.Itoa(k))
		out, err := child.CombinedOutput()
		if err == nil {
			if k < 10 {
				t.Fatalf("only %d statements", k-1)
			}
			t.Logf("%d statements", k-1)
			return
		}
		var exit *exec.ExitError
		if !errors.As(err, &exit) || exit.Sys().(syscall.WaitStatus).Signal() != syscall.SIGKILL {
			t.Fatalf("child: %v\n%s", err, out)
		}
		store := openStore(t, n.path, nil)
		mustEqual(t, fmt.Sprintf("killed at statement %d", k), dump(t, store, true), inHand)
		if err := store.Close(); err != nil {
			t.Fatal(err)
		}
		n.open(t, one(scripted), quick)
		n.settle()
		mustEqual(t, fmt.Sprintf("after a kill at statement %d", k), dump(t, n.store, true), end)
		if err := n.store.Close(); err != nil {
			t.Fatal(err)
		}
	}
}
