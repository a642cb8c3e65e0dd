package executor

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"postrider/internal/agent"
	"postrider/internal/sqlite"
)

// returns makes an agent that returns the given effects one after the other, then none.
func returns(list ...agent.Effects) agent.Func {
	return func(context.Context, agent.Step) (agent.Effects, error) {
		if len(list) == 0 {
			return agent.Effects{}, nil
		}
		e := list[0]
		list = list[1:]
		return e, nil
	}
}

func TestStepConsumesItsInputWhateverItReturns(t *testing.T) {
	for name, c := range map[string]struct {
		effects agent.Effects
		want    []string
	}{
		"nothing":  {agent.Effects{}, nil},
		"events":   {agent.Effects{Events: []agent.Event{{Type: "e1"}, {Type: "e2", Subject: "s"}}}, []string{"2 e1", "3 e2"}},
		"commands": {agent.Effects{Commands: []agent.Command{{Agent: "b@n2", Run: "x", Type: "c"}}}, []string{"2 b@n2"}},
		"messages": {agent.Effects{Messages: []agent.Message{{Topic: "lamp", Payload: []byte{0xff, 0}, Retain: true}}}, []string{"2 lamp"}},
		"all": {agent.Effects{Messages: []agent.Message{{Topic: "lamp"}}, Events: []agent.Event{{Type: "e"}}, Commands: []agent.Command{{Agent: "b@n2", Run: "x", Type: "c"}}, Next: agent.Done},
			[]string{"2 e", "3 b@n2", "4 lamp", "5 postrider.run.done"}},
		"fail": {agent.Effects{Next: agent.Fail}, []string{"2 postrider.run.failed"}},
	} {
		t.Run(name, func(t *testing.T) {
			n := newNode(t, one(returns(c.effects)), quick)
			n.send("a", "r", "x", "1")
			n.settle()
			if got, want := n.exported("r"), append([]string{"1 postrider.run.started"}, c.want...); !slices.Equal(got, want) {
				t.Errorf("records %v, want %v", got, want)
			}
			if got := n.stepInputs("r"); !slices.Equal(got, []string{"x"}) {
				t.Errorf("steps consumed %v", got)
			}
			if d := n.show("r"); d.Pending != 0 || d.Step != 1 || d.Status == "paused" {
				t.Errorf("run %+v", d)
			}
		})
	}
}

// Bytes that any decoding and encoding would change: large integers, decimals, signed zero, lone surrogates, duplicate
// keys, white space.
const oddJSON = " {\"a\":9007199254740993,\t\"b\":0.10,\"c\":-0.0,\"d\":\"\\ud800 \\u00e9 <&> é\",\"a\":1e400,\n\"\":[ ]}\n"

func TestStateAndDataKeepTheirBytes(t *testing.T) {
	var seen []agent.Step
	n := newNode(t, one(func(_ context.Context, s agent.Step) (agent.Effects, error) {
		s.State = slices.Clone(s.State)
		seen = append(seen, s)
		raw := json.RawMessage(oddJSON)
		return agent.Effects{State: raw, Events: []agent.Event{{Type: "e", Data: raw}}, Commands: []agent.Command{{Agent: "b@n2", Run: "x", Type: "c", Data: raw}}}, nil
	}), quick)
	n.send("a", "r", "1", oddJSON)
	n.send("a", "r", "2", oddJSON)
	n.settle()
	if string(seen[0].State) != "null" {
		t.Errorf("first state %q, want null", seen[0].State)
	}
	if got := string(seen[1].State); got != oddJSON {
		t.Errorf("state %q", got)
	}
	for _, s := range seen {
		if got := string(s.Input.Data); got != oddJSON {
			t.Errorf("input data %q", got)
		}
	}
	if got := string(n.show("r").State); got != oddJSON {
		t.Errorf("state shown %q", got)
	}
	if got := n.value("SELECT count(*) FROM outbox WHERE kind IN (1, 2) AND CAST(data AS TEXT) = ?", oddJSON); got != "4" {
		t.Errorf("%s of 4 records have their bytes", got)
	}
}

func TestAbsentStateStaysAndNullIsAState(t *testing.T) {
	n := newNode(t, one(returns(agent.Effects{State: json.RawMessage(`{"n": 1}`)}, agent.Effects{}, agent.Effects{}, agent.Effects{State: json.RawMessage("null")}, agent.Effects{})), quick)
	for i, want := range []string{`{"n": 1}`, `{"n": 1}`, `{"n": 1}`, "null", "null"} {
		n.send("a", "r", "", "1")
		n.settle()
		if got := string(n.show("r").State); got != want {
			t.Errorf("state %s after step %d, want %s", got, i+1, want)
		}
	}
	if got := n.value("SELECT group_concat(codec || ' ' || COALESCE(base_id, '-'), ', ') FROM checkpoint"); got != "1 -, 1 -, 0 2, 0 2, 1 -, 0 5" {
		t.Errorf("checkpoints are %s: an unchanged state names the checkpoint that holds it", got)
	}
}

func TestAgentCannotChangeWhatIsStored(t *testing.T) {
	buf := []byte(`{"n":1}`)
	n := newNode(t, one(func(_ context.Context, s agent.Step) (agent.Effects, error) {
		if s.Number == 1 {
			return agent.Effects{State: buf, Next: agent.Continue}, nil
		}
		if string(s.State) != `{"n":1}` {
			t.Errorf("step %d has state %s", s.Number, s.State)
		}
		copy(s.State, `{"n":8}`)
		copy(buf, `{"n":9}`)
		if s.Number == 2 {
			return agent.Effects{Next: agent.Continue}, nil
		}
		return agent.Effects{Events: []agent.Event{{Type: "e"}}}, nil
	}), quick)
	n.send("a", "r", "", "1")
	n.settle()
	n.mustBe("r", "idle", `{"n":1}`)
}

func TestContinueGoesOnAtOnceAndWithoutInput(t *testing.T) {
	var inputs []string
	n := newNode(t, one(func(_ context.Context, s agent.Step) (agent.Effects, error) {
		id := "-"
		if s.Input != nil {
			id = s.Input.ID
		}
		inputs = append(inputs, id)
		e := agent.Effects{State: json.RawMessage(fmt.Sprint(s.Number)), Next: agent.Continue}
		if s.Number == 4 || s.Number == 6 {
			e.Next = agent.Wait
		}
		return e, nil
	}), quick)
	n.send("a", "r", "one", "1")
	n.send("a", "r", "two", "1")
	n.settle()
	if want := []string{"one", "-", "-", "-", "two", "-"}; !slices.Equal(inputs, want) {
		t.Errorf("steps had inputs %v, want %v", inputs, want)
	}
}

func TestTooManyContinuesPauseTheRun(t *testing.T) {
	o := quick
	o.MaxContinue = 7
	n := newNode(t, map[string]agent.Agent{
		"a": returns(slices.Repeat([]agent.Effects{{Next: agent.Continue}}, 100)...),
		"b": agent.Func(scripted),
	}, o)
	n.send("a", "r", "", "1")
	n.send("b", "healthy", "", "{}")
	n.settle()
	n.mustBe("r", "paused", "")
	if d := n.show("r"); d.Step != 7 || !strings.Contains(d.LastError, "7 steps") {
		t.Errorf("paused at step %d with %q", d.Step, d.LastError)
	}
	if got := n.exported("r"); got[len(got)-1] != "2 postrider.run.paused" {
		t.Errorf("records %v", got)
	}
	n.mustBe("healthy", "idle", "1")
}

// A run with many inputs never comes near the bound, whichever way it gets from one step to the next.
func TestContinuesAreCountedFromTheLastInput(t *testing.T) {
	o := quick
	o.MaxContinue = 3
	agents := one(func(_ context.Context, s agent.Step) (agent.Effects, error) {
		if s.Number%3 == 0 && s.Number <= 12 {
			return agent.Effects{}, nil
		}
		return agent.Effects{Next: agent.Continue}, nil
	})
	for name, settle := range map[string]func(t *testing.T, n *node){
		"one after the other": func(_ *testing.T, n *node) { n.settle() },
		"process dies in each step": func(t *testing.T, n *node) {
			for range 10 {
				if n.show("r").Status == "ready" {
					n.commit(n.inHand(t), false)
					n.restart(t, agents, o)
				}
			}
		},
		"others come in between": func(t *testing.T, n *node) {
			id, err := runByName(n, "r")
			if err != nil {
				t.Fatal(err)
			}
			for range 10 {
				w := &worker{pool: &pool{}}
				w.pool.hungry.Store(true)
				n.work(t.Context(), id, w)
			}
		},
	} {
		t.Run(name, func(t *testing.T) {
			n := newNode(t, agents, o)
			for range 2 {
				n.send("a", "r", "", "1")
				n.send("a", "r", "", "1")
				settle(t, n)
			}
			n.mustBe("r", "idle", "null")
			if d := n.show("r"); d.Step != 12 || d.Pending != 0 {
				t.Errorf("run %+v, want 12 steps", d.RunInfo)
			}
			n.send("a", "r", "", "1")
			settle(t, n)
			n.mustBe("r", "paused", "null")
			if d := n.show("r"); d.Step != 15 {
				t.Errorf("run %+v, want 15 steps", d.RunInfo)
			}
		})
	}
}

// commit commits what the agent of a claim answers.
func (n *node) commit(c *claim, yield bool) {
	n.t.Helper()
	plan := n.plan(c)
	n.write(func(ctx context.Context, tx *sqlite.Tx) error {
		_, err := commitStep(ctx, tx, c, plan, yield, n.o.MaxContinue)
		return err
	})
}

// The attempts of a step are not those of the next one, also if the process dies before it knows how that one ends.
func TestSuccessEndsTheCountOfAttempts(t *testing.T) {
	for name, yield := range map[string]bool{"next step in hand": false, "others come in between": true} {
		t.Run(name, func(t *testing.T) {
			n := newNode(t, one(scripted), quick)
			n.send("a", "r", "x", "{}")
			n.send("a", "r", "y", "{}")
			c := n.inHand(t)
			n.write(func(ctx context.Context, tx *sqlite.Tx) error {
				return failStep(ctx, tx, c, verdict{reason: "broken", status: "waiting", wakeUS: 1, countsAsOf: 1})
			})
			if d := n.show("r"); d.Attempts != 1 || d.LastError != "broken" {
				t.Errorf("after the failure: %+v", d.RunInfo)
			}
			if c = n.inHand(t); c.attempt != 2 || c.lastError != "broken" {
				t.Errorf("attempt %d, last error %q, want 2 and the failure's", c.attempt, c.lastError)
			}
			c.alone = false // so that the end of the process does not count either
			n.commit(c, yield)
			if d := n.show("r"); d.Step != 1 || d.Attempts != 0 || d.LastError != "" {
				t.Errorf("after the success: %+v", d.RunInfo)
			}
			n.restart(t, one(scripted), quick)
			if c = n.inHand(t); c.input.ID != "y" || c.attempt != 1 || c.lastError != "" {
				t.Errorf("input %s, attempt %d, last error %q, want the first at y", c.input.ID, c.attempt, c.lastError)
			}
		})
	}
}

// An agent may answer after its attempt was written off. Whatever became of the run meanwhile, and whatever the step would
// lead to, the answer changes nothing, and the attempt that counts is free to commit.
func TestLateAnswerChangesNothing(t *testing.T) {
	fail := func(n *node, c *claim, v verdict) {
		v.reason, v.countsAsOf = "silence", 1
		n.write(func(ctx context.Context, tx *sqlite.Tx) error { return failStep(ctx, tx, c, v) })
	}
	for name, meanwhile := range map[string]func(n *node, late *claim) (inHand *claim){
		"run waits": func(n *node, late *claim) *claim {
			fail(n, late, verdict{status: "waiting", wakeUS: 1 << 60})
			return nil
		},
		"step was given back": func(n *node, late *claim) *claim {
			n.write(func(ctx context.Context, tx *sqlite.Tx) error { return giveBack(ctx, tx, late) })
			return nil
		},
		"second attempt is in hand": func(n *node, late *claim) *claim {
			fail(n, late, verdict{status: "waiting", wakeUS: 1})
			return n.inHand(n.t)
		},
		"another branch is live": func(n *node, late *claim) *claim {
			fail(n, late, verdict{status: "waiting", wakeUS: 1})
			n.rewind("r", 1)
			return nil
		},
		"another branch is in hand": func(n *node, late *claim) *claim {
			fail(n, late, verdict{status: "waiting", wakeUS: 1})
			n.rewind("r", 1)
			return n.inHand(n.t)
		},
		// Numbers of claims do not come back; should they ever, the branch tells.
		"another branch is in hand under the same number": func(n *node, late *claim) *claim {
			fail(n, late, verdict{status: "waiting", wakeUS: 1})
			n.rewind("r", 1)
			c := n.inHand(n.t)
			n.exec("UPDATE run SET claim = ? WHERE name = 'r'", late.no)
			c.no = late.no
			return c
		},
		"run is paused": func(n *node, late *claim) *claim {
			fail(n, late, verdict{status: "paused"})
			return nil
		},
		"input was set aside": func(n *node, late *claim) *claim {
			fail(n, late, verdict{status: "dead"})
			return nil
		},
	} {
		t.Run(name, func(t *testing.T) {
			n := newNode(t, one(scripted), quick)
			prepare(n)
			late, plan := n.claimed(t)
			inHand := meanwhile(n, late)
			before := dump(t, n.store, false)
			for _, next := range []agent.Next{agent.Wait, agent.Continue, agent.Done} {
				for _, yield := range []bool{false, true} {
					plan.next = next
					err := n.store.Write(t.Context(), func(ctx context.Context, tx *sqlite.Tx) error {
						_, err := commitStep(ctx, tx, late, plan, yield, 10)
						return err
					})
					if !errors.Is(err, errFenced) {
						t.Errorf("late answer, next %s, yield %v: %v, want errFenced", next, yield, err)
					}
				}
			}
			mustEqual(t, "after the late answer", dump(t, n.store, false), before)
			if inHand == nil {
				return
			}
			n.commit(inHand, true)
			if d := n.show("r"); d.Step != 2 || d.Status != "ready" || d.Attempts != 0 {
				t.Errorf("after the attempt that counts: %+v", d.RunInfo)
			}
			if got := n.stepInputs("r"); !slices.Equal(got, []string{"first", "busy"}) {
				t.Errorf("steps had inputs %v", got)
			}
		})
	}
}

func TestDoneRunTakesNoStep(t *testing.T) {
	for next, status := range map[string]string{"done": "done", "fail": "failed"} {
		n := newNode(t, one(scripted), quick)
		n.send("a", "r", "1", `{"next": "`+next+`"}`)
		n.send("a", "r", "2", `{}`) // waits for a reopen
		n.settle()
		n.mustBe("r", status, "1")
		if d := n.show("r"); d.Pending != 1 {
			t.Errorf("%d inputs wait, want 1", d.Pending)
		}
	}
}

func TestInvalidEffectsNameTheirFieldAndAreTriedAgain(t *testing.T) {
	big := strings.Repeat("x", 256<<10)
	many := make([]agent.Event, 1001)
	for i := range many {
		many[i].Type = "e"
	}
	large := make([]agent.Message, 40)
	for i := range large {
		large[i] = agent.Message{Topic: "t", Payload: []byte(big)}
	}
	event := func(e agent.Event) agent.Effects {
		return agent.Effects{Events: []agent.Event{{Type: "good"}, e}}
	}
	command := func(c agent.Command) agent.Effects {
		return agent.Effects{Commands: []agent.Command{{Type: "good"}, c}}
	}
	message := func(m agent.Message) agent.Effects {
		return agent.Effects{Messages: []agent.Message{{Topic: "good"}, m}}
	}
	now := time.Now()
	for _, c := range []struct {
		effects agent.Effects
		want    string
	}{
		{agent.Effects{Next: "stop"}, "next: "},
		{agent.Effects{State: json.RawMessage(`{"a":}`)}, "state: is not JSON"},
		{agent.Effects{State: json.RawMessage{}}, "state: is not JSON"},
		{agent.Effects{State: json.RawMessage("\"\xff\"")}, "state: is not UTF-8"},
		{agent.Effects{State: json.RawMessage(`"` + strings.Repeat("x", 16<<20) + `"`)}, "state: has 16777218 bytes"},
		{agent.Effects{Events: many}, "effects: 1001 records"},
		{agent.Effects{Cancel: make([]string, 1001)}, "cancel: has 1001 ids"},
		{agent.Effects{Messages: large}, "effects: records hold"},
		{event(agent.Event{}), "events[1].type: "},
		{event(agent.Event{Type: "postrider.run.done"}), "events[1].type: "},
		{event(agent.Event{Type: "a\nb"}), "events[1].type: "},
		{event(agent.Event{Type: strings.Repeat("x", 256)}), "events[1].type: has 256 bytes"},
		{event(agent.Event{Type: "e", Subject: "\x00"}), "events[1].subject: "},
		{event(agent.Event{Type: "e", Subject: strings.Repeat("x", 1025)}), "events[1].subject: has 1025"},
		{event(agent.Event{Type: "e", Data: json.RawMessage(`{`)}), "events[1].data: is not JSON"},
		{event(agent.Event{Type: "e", Data: json.RawMessage(`"` + big + `"`)}), "events[1].data: has 262146 bytes"},
		{command(agent.Command{}), "commands[1].type: "},
		{command(agent.Command{Agent: "no spaces", Type: "t"}), "commands[1].agent: "},
		{command(agent.Command{Agent: "nobody", Run: "x", Type: "t"}), "commands[1].agent: nobody is not hosted here"},
		{command(agent.Command{Agent: "nobody@n1", Run: "x", Type: "t"}), "commands[1].agent: nobody is not hosted here"},
		{command(agent.Command{Agent: "b@", Run: "x", Type: "t"}), "commands[1].agent: node"},
		{command(agent.Command{Agent: "@n2", Run: "x", Type: "t"}), "commands[1].agent: is empty"},
		{command(agent.Command{Agent: "b@n2@n3", Run: "x", Type: "t"}), "commands[1].agent: node"},
		{command(agent.Command{Agent: "b", Type: "t"}), "commands[1].run: is missing"},
		{command(agent.Command{Agent: "a@n2", Type: "t"}), "commands[1].run: is missing"},
		{command(agent.Command{Run: "a/b", Type: "t"}), "commands[1].run: "},
		{command(agent.Command{Type: "t", Data: json.RawMessage(`nul`)}), "commands[1].data: is not JSON"},
		{command(agent.Command{Type: "t", ID: strings.Repeat("x", 256)}), "commands[1].id: has 256"},
		{command(agent.Command{Type: "t", ID: "a\x7f"}), "commands[1].id: "},
		{command(agent.Command{Type: "t", In: -time.Second}), "commands[1].in: -1s is negative"},
		{command(agent.Command{Type: "t", In: 1, At: now}), "commands[1].at: excludes in"},
		{command(agent.Command{Type: "t", At: time.Date(10_000, 1, 1, 0, 0, 0, 0, time.UTC)}), "commands[1].at: "},
		{command(agent.Command{Type: "t", ExpiresIn: -1}), "commands[1].expires_in: "},
		{message(agent.Message{}), "messages[1].topic: is empty"},
		{message(agent.Message{Topic: "a/#"}), "messages[1].topic: "},
		{message(agent.Message{Topic: "postrider/v1/x"}), "messages[1].topic: "},
		{message(agent.Message{Topic: "$SYS/x"}), "messages[1].topic: "},
		{message(agent.Message{Topic: "t", Payload: []byte(big + "x")}), "messages[1]: payload has 262145 bytes"},
		{message(agent.Message{Topic: "t", ExpiresIn: -1}), "messages[1].expires_in: "},
	} {
		t.Run(c.want, func(t *testing.T) {
			var lastError string
			var n *node
			n = newNode(t, map[string]agent.Agent{"b": agent.Func(scripted), "a": agent.Func(func(_ context.Context, s agent.Step) (agent.Effects, error) {
				if s.Attempt == 1 {
					return c.effects, nil
				}
				lastError = s.LastError
				if got := n.exported("r"); len(got) != 1 {
					t.Errorf("records %v of invalid effects", got)
				}
				if got := n.value("SELECT count(*) FROM inbox"); got != "1" {
					t.Errorf("%s inputs, want the one", got)
				}
				return agent.Effects{}, nil
			})}, quick)
			n.send("a", "r", "x", "1")
			n.settle()
			if !strings.Contains(lastError, "invalid effects: "+c.want) {
				t.Errorf("last error %.200q, want %q", lastError, c.want)
			}
			n.mustBe("r", "idle", "null")
		})
	}
}

func TestRecordsCarryWhatCausedThem(t *testing.T) {
	n := newNode(t, one(scripted), quick)
	n.send("a", "r", "in-1", `{"events": [{"type": "e"}], "commands": [{"agent": "b@n2", "run": "x", "type": "c", "id": "k", "expires_in": "1h"}, {"run": "r2", "type": "c",
		"data": {"commands": [{"agent": "b@n2", "run": "y", "type": "c"}]}}]}`)
	n.settle()
	for query, want := range map[string]string{
		"SELECT correlation || ' ' || causation FROM outbox WHERE type = 'e'": "in-1 in-1",
		// The id is the sender's own name for it within its run, or the place of the command.
		"SELECT input_id || ' ' || hops || ' ' || to_node || ' ' || to_agent || ' ' || to_run || ' ' || ((expires_us - occurred_us + 500000) / 1000000) FROM outbox WHERE to_run = 'x'": "pr:n1/d/r/k 1 n2 b x 3600",
		"SELECT input_id = 'pr:' || (SELECT ulid FROM branch WHERE id = o.branch) || '/1/0' AND hops = 1 FROM outbox o WHERE to_run = 'y'":                                              "1",
		"SELECT correlation FROM outbox WHERE to_run = 'y'": "in-1",
	} {
		if got := n.value(query); got != want {
			t.Errorf("%s: %q, want %q", query, got, want)
		}
	}
}

func TestLocalCommandsAreInputsWithinTheStep(t *testing.T) {
	n := newNode(t, map[string]agent.Agent{"a": agent.Func(scripted), "b": agent.Func(scripted)}, quick)
	n.send("a", "over", "", `{"next": "done"}`)
	n.send("b", "others", "", `{}`)
	n.send("a", "taken", "", `{}`)
	n.settle()
	n.send("a", "r", "x", `{"commands": [
		{"type": "self", "data": {"state": "own"}},
		{"agent": "b", "run": "new", "type": "t", "id": "k", "data": {}},
		{"agent": "b", "run": "new", "type": "t", "id": "k", "data": {}},
		{"agent": "b", "run": "new", "type": "t", "id": "k", "data": {"state": 5}},
		{"agent": "b@n1", "run": "new2", "type": "t", "data": {}},
		{"run": "over", "type": "t", "data": {}},
		{"run": "others", "type": "t", "data": {}}]}`)
	n.settle()
	n.mustBe("r", "idle", `"own"`)
	n.mustBe("new", "idle", "1") // the same id twice counts once
	n.mustBe("new2", "idle", "1")
	n.mustBe("over", "done", "1")
	n.mustBe("others", "idle", "1")
	rows := n.value(`SELECT group_concat(run_name || ': ' || reason, '; ' ORDER BY id) FROM inbox WHERE outcome = 'dead'`)
	want := `new: conflict: input id "pr:n1/d/r/k" of run new was used for other content; over: conflict: run over is done and takes no input; ` +
		`others: conflict: run others belongs to agent b, not a`
	if rows != want {
		t.Errorf("dead letters\n%s\nwant\n%s", rows, want)
	}
}

func TestTimerComesWhenItIsDueUnlessCancelled(t *testing.T) {
	n := newNode(t, one(scripted), quick)
	n.send("a", "r", "x", `{"commands": [{"type": "t", "in": "1h", "id": "late", "data": {"state": "late"}}, {"type": "t", "at": "2100-01-01T00:00:00Z", "id": "later", "data": {"state": "later"}},
		{"type": "t", "at": "2001-01-01T00:00:00Z", "data": {"state": "past"}}]}`)
	n.settle()
	n.mustBe("r", "waiting", `"past"`)
	if d := n.show("r"); d.Pending != 2 || time.Until(time.UnixMicro(d.WakeUS)).Round(time.Minute) != time.Hour {
		t.Errorf("%d inputs wait, wake in %s, want 2 in 1h", d.Pending, time.Until(time.UnixMicro(d.WakeUS)))
	}
	if got := n.value("SELECT source || at_us FROM inbox WHERE command_id = 'later'"); got != "timer4102444800000000" {
		t.Errorf("timer %s", got)
	}
	n.send("a", "r", "y", `{"cancel": ["late", "no such"]}`) // does not wait for the timer
	n.settle()
	if d := n.show("r"); d.Status != "waiting" || d.Pending != 1 || d.WakeUS != 4102444800000000 {
		t.Errorf("after the cancellation: %+v", d)
	}
	n.exec("UPDATE inbox SET due_us = 1") // the hours pass
	n.exec("UPDATE run SET wake_us = 1")
	n.settle()
	n.mustBe("r", "idle", `"later"`)
}

func TestTimerFiresInARunningExecutor(t *testing.T) {
	n := newNode(t, one(scripted), quick)
	n.start(t)
	n.send("a", "r", "x", `{"commands": [{"type": "t", "in": "300ms", "data": {"state": "fired"}}]}`)
	n.Wake()
	eventually(t, "timer", func() bool {
		return n.value("SELECT count(*) FROM checkpoint WHERE CAST(state AS TEXT) = '\"fired\"'") == "1"
	})
	early := n.value("SELECT c.started_us - i.due_us < 0 FROM checkpoint c JOIN inbox i ON i.id = c.input WHERE i.source = 'timer'")
	if early != "0" {
		t.Error("the timer came too early")
	}
}

// A run may be in hand with the input that another run cancels, be between two attempts at it, or be paused at it.
func TestCancelledCommandFreesItsRun(t *testing.T) {
	for name, prepare := range map[string]func(n *node){
		"waiting": func(n *node) { n.settle() },
		"paused": func(n *node) {
			n.settle()
			for n.show("to").Status != "paused" {
				n.exec("UPDATE run SET wake_us = 1 WHERE status = 'waiting'")
				n.settle()
			}
		},
		"in hand": func(n *node) {
			n.write(func(ctx context.Context, tx *sqlite.Tx) error {
				c, err := claimStep(ctx, tx, 2, n.hosted, n.hand())
				if err == nil && c == nil {
					err = fmt.Errorf("no step")
				}
				return err
			})
		},
	} {
		t.Run(name, func(t *testing.T) {
			o := Options{BackoffMin: time.Hour, BackoffMax: time.Hour, MaxAttempts: 3}
			n := newNode(t, map[string]agent.Agent{"a": agent.Func(scripted), "b": agent.Func(func(ctx context.Context, s agent.Step) (agent.Effects, error) {
				if s.Input.Type == "poison" {
					return agent.Effects{}, fmt.Errorf("no")
				}
				if s.Attempt != 1 || s.LastError != "" {
					t.Errorf("the next input comes with attempt %d, last error %q", s.Attempt, s.LastError)
				}
				return scripted(ctx, s)
			})}, o)
			n.send("a", "from", "x", `{"commands": [{"agent": "b", "run": "to", "type": "poison", "id": "p", "data": {}}]}`)
			id, err := runByName(n, "from")
			if err != nil {
				t.Fatal(err)
			}
			n.work(t.Context(), id, &worker{pool: &pool{}})
			n.send("b", "to", "next", `{}`)
			prepare(n)
			if name != "in hand" {
				n.mustBe("to", name, "null")
			}
			n.send("a", "from", "y", `{"cancel": ["p"]}`)
			n.settle()
			n.mustBe("to", "idle", "1")
			want := []string{"1 postrider.run.started"}
			if name == "paused" {
				want = append(want, "2 postrider.run.paused", "3 postrider.run.resumed")
			}
			if got := n.exported("to"); !slices.Equal(got, want) {
				t.Errorf("records %v, want %v", got, want)
			}
		})
	}
}

func runByName(n *node, run string) (id int64, err error) {
	err = n.store.Reader().QueryRow("SELECT id FROM run WHERE name = ?", run).Scan(&id)
	return id, err
}

// A step in hand whose input another run cancels changes nothing, and its run goes on with the next one.
func TestStepOfACancelledInputIsFencedAndItsRunGoesOn(t *testing.T) {
	entered, leave := make(chan struct{}, 1), make(chan struct{})
	n := newNode(t, map[string]agent.Agent{"a": agent.Func(scripted), "b": agent.Func(func(ctx context.Context, s agent.Step) (agent.Effects, error) {
		if s.Input.Type == "slow" {
			entered <- struct{}{}
			<-leave
		}
		return scripted(ctx, s)
	})}, quick)
	n.start(t)
	n.send("a", "from", "x", `{"commands": [{"agent": "b", "run": "to", "type": "slow", "id": "p", "data": {"state": "late"}}]}`)
	n.Wake()
	receive(t, "the step", entered)
	n.send("a", "from", "y", `{"cancel": ["p"]}`)
	n.Wake()
	eventually(t, "cancellation", func() bool { return n.value("SELECT count(*) FROM inbox WHERE cancelled_branch IS NOT NULL") == "1" })
	n.send("b", "to", "z", `{"state": "next"}`)
	close(leave)
	eventually(t, "next input", func() bool { return n.show("to").Status == "idle" && n.show("to").Step == 1 })
	n.mustBe("to", "idle", `"next"`)
}

// What the transactions ask looks rows up by an index and sorts nothing, however big the tables are.
func TestHotStatementsScanNoTable(t *testing.T) {
	queries := map[string]bool{}
	n := newNode(t, one(scripted), quick)
	n.before = func(q string) error { queries[q] = true; return nil }
	prepare(n)
	n.settle()
	if _, err := n.trySend("a", "over", "z", "{}"); err == nil {
		t.Error("a done run took an input")
	}
	n.rewind("r", 1)
	n.settle()
	n.before = nil
	db := n.store.Reader()
	queries[readyQuery], queries[stepsQuery] = true, true
	for q := range queries {
		rows, err := db.Query("EXPLAIN QUERY PLAN "+q, slices.Repeat([]any{1}, 30)...)
		if err != nil {
			t.Fatalf("%s: %v", q, err)
		}
		for rows.Next() {
			var id, parent, unused int64
			var step string
			if err := rows.Scan(&id, &parent, &unused, &step); err != nil {
				t.Fatal(err)
			}
			scan, ok := strings.CutPrefix(step, "SCAN ")
			if ok && scan != "w" && scan != "walk" && !strings.HasPrefix(scan, "run USING INDEX run_wake") && scan != "CONSTANT ROW" ||
				strings.Contains(step, "TEMP B-TREE") {
				t.Errorf("%s\nof\n%s", step, q)
			}
		}
		if err := rows.Err(); err != nil {
			t.Error(err)
		}
		rows.Close()
	}
	if len(queries) < 30 {
		t.Errorf("only %d statements", len(queries))
	}
}
