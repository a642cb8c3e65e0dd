package executor

import (
	"context"
	"errors"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"postrider/internal/agent"
	"postrider/internal/record"
	"postrider/internal/sqlite"
	"postrider/outbox"
)

// routed is quick with routes, each AGENT=NODE or AGENT=NODE,best-effort.
func routed(routes ...string) Options {
	o := quick
	o.Routes = map[string]Route{}
	for _, r := range routes {
		name, to, _ := strings.Cut(r, "=")
		to, _, best := strings.Cut(to, ",")
		o.Routes[name] = Route{Node: to, BestEffort: best}
	}
	return o
}

// commands lists the pending commands, as they would go out.
func (n *node) commands() (list []string) {
	n.t.Helper()
	for _, it := range n.pending() {
		if it.Kind == record.Command {
			list = append(list, fmt.Sprintf("%s %d: %s@%s %s %s %s hops %d", it.Key.Run, it.LSN, it.ToAgent, it.ToNode, it.ToRun, it.InputID, it.Data, it.Hops))
		}
	}
	return list
}

func (n *node) pending() []outbox.Item {
	n.t.Helper()
	items, err := outbox.New(n.store, n.node).Drain(context.Background(), "", new(outbox.Cursor), 1000)
	if err != nil {
		n.t.Fatalf("%v", err)
	}
	return items
}

// inbox lists all inputs: id, state, run.
func (n *node) inbox() (list []string) {
	n.t.Helper()
	rows, err := n.store.Reader().Query(`SELECT i.input_id || ' ' || COALESCE(i.outcome, iif(i.consumed_branch IS NULL, iif(i.cancelled_branch IS NULL, 'pending', 'cancelled'), 'consumed'))
		|| iif(i.run IS NULL, ' nowhere', ' here') || COALESCE(': ' || i.reason, '') FROM inbox i ORDER BY id`)
	if err != nil {
		n.t.Fatalf("%v", err)
	}
	defer rows.Close()
	for rows.Next() {
		var s string
		if err := rows.Scan(&s); err != nil {
			n.t.Fatalf("%v", err)
		}
		list = append(list, s)
	}
	return list
}

func (n *node) want(what string, got, want []string) {
	n.t.Helper()
	if !slices.Equal(got, want) {
		n.t.Errorf("%s:\n\t%s\nwant\n\t%s", what, strings.Join(got, "\n\t"), strings.Join(want, "\n\t"))
	}
}

// fromNode is what comes to this node's inbox from another node.
func fromNode(node string, branch int, lsn int64, agentName, run, id, data string, hops int64) record.Inbound {
	return record.Inbound{Tenant: "d", Agent: agentName, Run: run, ID: id, Type: "t", Source: "/" + node + "/d/~node/x", Data: []byte(data), Hops: hops,
		FromNode: node, From: record.BranchKey{Tenant: "d", Run: record.NodeRun, Branch: fmt.Sprintf("%026d", branch)}, LSN: lsn}
}

func (n *node) receive(in ...record.Inbound) []record.Outcome {
	n.t.Helper()
	out, err := Receive(context.Background(), n.store, in)
	if err != nil {
		n.t.Fatalf("receive: %v", err)
	}
	return out
}

func TestInputsGoWhereTheyBelong(t *testing.T) {
	for name, c := range map[string]struct {
		agents  []string // hosted now; a was hosted before
		routes  []string
		steps   bool // run r of agent a has a step here
		waiting bool // or an input, and no step
		to      string
		want    []string // commands
		inbox   []string
		err     error
	}{
		"hosted":                             {agents: []string{"a"}, to: "a", inbox: []string{"x consumed here"}},
		"hosted, with a route":               {agents: []string{"a"}, routes: []string{"a=n2"}, to: "a", inbox: []string{"x consumed here"}},
		"addressed to this node":             {agents: []string{"a"}, routes: []string{"a=n2"}, to: "a@n1", inbox: []string{"x consumed here"}},
		"addressed to another node":          {agents: []string{"a"}, to: "a@n2", want: []string{"~node 1: a@n2 r x {} hops 1"}, inbox: []string{"x handed-over nowhere: to node n2"}},
		"a stranger, addressed":              {to: "b@n2", want: []string{"~node 1: b@n2 r x {} hops 1"}, inbox: []string{"x handed-over nowhere: to node n2"}},
		"gone, with a route":                 {routes: []string{"a=n2"}, to: "a", want: []string{"~node 1: a@n2 r x {} hops 1"}, inbox: []string{"x handed-over nowhere: to node n2"}},
		"gone, routed to this very node":     {routes: []string{"a=n1"}, to: "a", inbox: []string{"x pending here"}},
		"gone, no route":                     {to: "a", inbox: []string{"x pending here"}},
		"gone, with a route, run has a step": {routes: []string{"a=n2"}, steps: true, to: "a", inbox: []string{"first consumed here", "x pending here"}},
		"gone, with a route, run has no step": {routes: []string{"a=n2"}, waiting: true, to: "a",
			want:  []string{"~node 1: a@n2 r first {} hops 1", "~node 2: a@n2 r x {} hops 1"},
			inbox: []string{"first handed-over nowhere: to node n2", "x handed-over nowhere: to node n2"}},
		"a stranger with a route": {routes: []string{"b=n2"}, to: "b", want: []string{"~node 1: b@n2 r x {} hops 1"}, inbox: []string{"x handed-over nowhere: to node n2"}},
		"a stranger":              {to: "b", err: ErrNotFound},
	} {
		t.Run(name, func(t *testing.T) {
			n := newNode(t, one(scripted), quick)
			if c.steps || c.waiting {
				n.send("a", "r", "first", "{}")
			}
			if c.steps {
				n.settle()
			}
			now := map[string]agent.Agent{"other": agent.Func(scripted)}
			for _, a := range c.agents {
				now[a] = agent.Func(scripted)
			}
			n.restart(t, now, routed(c.routes...))
			if _, err := n.trySend(c.to, "r", "x", "{}"); !errors.Is(err, c.err) {
				t.Fatalf("send: %v, want %v", err, c.err)
			}
			n.settle()
			n.want("commands", n.commands(), c.want)
			n.want("inbox", n.inbox(), c.inbox)
		})
	}
}

// What waits for an agent that is away goes on when it is back.
func TestUnhostedRunsWaitForTheirAgent(t *testing.T) {
	n := newNode(t, one(scripted), quick)
	n.steps("r", 1, 1)
	n.restart(t, map[string]agent.Agent{"b": agent.Func(scripted)}, routed("a=n2"))
	n.send("a", "r", "x", "{}")
	n.settle()
	n.mustBe("r", "unhosted", "1")
	n.restart(t, one(scripted), routed("a=n2"))
	n.settle()
	n.mustBe("r", "idle", "2")
	n.want("commands", n.commands(), nil)
}

// An id is kept on every way: what was handed over and comes back, since its agent is here again, is handled once.
func TestOwnHandOverComesBack(t *testing.T) {
	n := newNode(t, one(scripted), quick)
	n.restart(t, map[string]agent.Agent{}, routed("a=n2"))
	n.send("a", "r", "x", "{}")
	n.settle()
	n.want("commands", n.commands(), []string{"~node 1: a@n2 r x {} hops 1"})
	if out := n.send("a", "r", "x", "{}"); !out.Duplicate {
		t.Error("what was handed over is taken again")
	}
	n.restart(t, one(scripted), routed("a=n2"))
	if out := n.receive(fromNode("n2", 1, 1, "a", "r", "x", "{}", 2)); out[0] != record.Stored {
		t.Errorf("it was %s", out[0])
	}
	// The same once more: by the same record, by another one, and by the sender's own copy.
	if out := n.receive(fromNode("n2", 1, 1, "a", "r", "x", "{}", 2), fromNode("n2", 1, 2, "a", "r", "x", "{}", 2), fromNode("n3", 1, 1, "a", "r", "x", "{}", 0)); !slices.Equal(out,
		[]record.Outcome{record.Duplicate, record.Duplicate, record.Duplicate}) {
		t.Errorf("they were %s", out)
	}
	if out := n.send("a", "r", "x", "{}"); !out.Duplicate {
		t.Error("its own id is not seen")
	}
	n.settle()
	n.mustBe("r", "idle", "1")
}

func TestHopsAreBounded(t *testing.T) {
	n := newNode(t, map[string]agent.Agent{}, routed("a=n2"))
	n.receive(fromNode("n2", 1, 1, "a", "r", "seven", "{}", 7), fromNode("n2", 1, 2, "a", "r", "eight", "{}", 8), fromNode("n2", 1, 3, "a", "r", "nine", "{}", 9))
	n.settle()
	n.want("commands", n.commands(), []string{"~node 1: a@n2 r seven {} hops 8"})
	n.want("inbox", n.inbox(), []string{"seven handed-over nowhere: to node n2",
		"eight dead nowhere: was handed over 8 times; the routes of the nodes go round in a circle", "nine dead nowhere: hops: 9 is not in 0 to 8"})
}

// tape is what a way and the database did, in order.
type tape struct{ list []string }

func (tp *tape) before(query string) error {
	switch {
	case strings.Contains(query, "INSERT INTO outbox"):
		tp.list = append(tp.list, "store")
	case strings.Contains(query, "outcome = 'handed-over'") && strings.HasPrefix(query, "UPDATE inbox"):
		tp.list = append(tp.list, "retire")
	}
	return nil
}

type sends struct{ *tape }

func (w sends) Send(context.Context, *record.Record) error {
	w.list = append(w.list, "send")
	return nil
}

func TestHandOverOrder(t *testing.T) {
	begin := func(t *testing.T) (*node, *tape, []int64) {
		n := newNode(t, map[string]agent.Agent{}, routed("a=n2", "b=n2,best-effort"))
		first, second := n.send("a", "r", "x", "{}"), n.send("b", "r", "y", "{}")
		tp := &tape{}
		n.before = tp.before
		return n, tp, []int64{first.Row, second.Row}
	}
	t.Run("plain", func(t *testing.T) {
		n, tp, rows := begin(t)
		if err := handOver(t.Context(), n.store, outboxWay{func() { tp.list = append(tp.list, "send") }}, rows[:1]); err != nil {
			t.Fatal(err)
		}
		n.want("order", tp.list, []string{"store", "retire", "send"})
	})
	t.Run("best effort", func(t *testing.T) {
		n, tp, rows := begin(t)
		if err := handOver(t.Context(), n.store, sends{tp}, rows[1:]); err != nil {
			t.Fatal(err)
		}
		n.want("order", tp.list, []string{"send", "retire"})
		n.want("commands", n.commands(), nil)
	})
	t.Run("neither takes the other's", func(t *testing.T) {
		n, tp, rows := begin(t)
		if err := errors.Join(handOver(t.Context(), n.store, outboxWay{func() {}}, rows[1:]), handOver(t.Context(), n.store, sends{tp}, rows[:1])); err != nil {
			t.Fatal(err)
		}
		n.want("order", tp.list, nil)
		n.want("inbox", n.inbox(), []string{"x pending nowhere", "y pending nowhere"})
	})
	t.Run("best effort, send fails", func(t *testing.T) {
		n, _, _ := begin(t)
		away := errors.New("away")
		if _, err := NewForwarder(n.store, sqlite.Node{Name: "n1"}).Forward(t.Context(), func(context.Context, *record.Record) error { return away }); !errors.Is(err, away) {
			t.Errorf("Forward: %v", err)
		}
		n.want("inbox", n.inbox(), []string{"x pending nowhere", "y pending nowhere"})
		if got := n.value("SELECT attempts || last_error || (next_us > due_us) FROM inbox WHERE input_id = 'y'"); got != "1away1" {
			t.Errorf("attempts, last error and next try are %s", got)
		}
	})
	if _, ok := any(outboxWay{}).(durable); !ok {
		t.Error("the way of plain routes is not durable")
	}
	if _, ok := any(lent{}).(durable); ok {
		t.Error("the way of best-effort routes says it is durable")
	}
}

// The executor takes plain routes and leaves best-effort ones to whoever has a connection.
func TestForwardSendsWhatIsBestEffort(t *testing.T) {
	n := newNode(t, one(scripted), routed("b=n2,best-effort", "c=n2"))
	n.send("b", "r", "x", `{"n":9007199254740993}`)
	n.send("c", "r", "y", "{}")
	n.send("b@n3", "r", "z", "{}") // addressed: no best effort
	n.send("a", "s", "go", `{"commands": [{"agent": "b", "run": "r2", "type": "t", "data": {}, "id": "own"}]}`)
	n.settle()
	n.want("commands", n.commands(), []string{"~node 1: c@n2 r y {} hops 1", "~node 2: b@n3 r z {} hops 1"})
	f := NewForwarder(n.store, sqlite.Node{Name: "n1", Epoch: 5})
	var sent []string
	send := func(_ context.Context, r *record.Record) error {
		if err := r.Check(); err != nil {
			t.Errorf("it cannot travel: %v", err)
		}
		sent = append(sent, fmt.Sprintf("%s %d: %s@%s %s %s %s", r.Key.Run, r.LSN, r.ToAgent, r.ToNode, r.ToRun, r.InputID, r.Data))
		return nil
	}
	if k, err := f.Forward(t.Context(), send); k != 2 || err != nil {
		t.Errorf("Forward: %d, %v", k, err)
	}
	n.want("sent", sent, []string{`~node 1: b@n2 r x {"n":9007199254740993}`, "~node 2: b@n2 r2 pr:n1/d/s/own {}"})
	if k, err := f.Forward(t.Context(), send); k != 0 || err != nil {
		t.Errorf("Forward once more: %d, %v", k, err)
	}
}

// A crowd that waits for a best-effort route does not keep others from going.
func TestBestEffortInputsAreInNobodysWay(t *testing.T) {
	n := newNode(t, map[string]agent.Agent{}, routed("b=n2,best-effort", "c=n2"))
	for i := range strayBatch + 1 {
		n.send("b", "r", fmt.Sprint("b", i), "{}")
	}
	n.send("c", "r", "y", "{}")
	if _, err := n.passOn(t.Context()); err != nil {
		t.Fatal(err)
	}
	n.want("commands", n.commands(), []string{"~node 1: c@n2 r y {} hops 1"})
}

func TestWhatCannotTravelIsADeadLetter(t *testing.T) {
	o := routed("a=n2")
	o.MaxRecord = 100
	n := newNode(t, map[string]agent.Agent{}, o)
	late := fromNode("n3", 1, 1, "a", "r", "late", "{}", 1)
	late.Expires = time.Now().Add(-time.Minute).UnixMicro()
	n.receive(late)
	large := `"` + strings.Repeat("x", 99) + `"`
	var field *FieldError
	if _, err := n.trySend("a", "r", "large", large); !errors.As(err, &field) || field.Field != "data" || !strings.Contains(err.Error(), "at most 100 (--max-record) go to another node") {
		t.Errorf("a large one: %v", err)
	}
	n.receive(foreign("a", "r", "large", large))
	n.send("a", "r", "fits", `"`+strings.Repeat("x", 98)+`"`)
	n.exec("UPDATE inbox SET data = CAST(? AS BLOB) WHERE input_id = 'fits'", large) // as if the limit had been another
	n.settle()
	n.want("inbox", n.inbox(), []string{"late dead nowhere: expired before it was handed over", "large dead nowhere: invalid data: has 101 bytes; at most 100 (--max-record) go to another node",
		"fits dead nowhere: has 101 bytes; at most 100 (--max-record) go to another node"})
}

// A fault before any statement leaves the input in the inbox or in the outbox, never in both and never in none.
func TestFaultInAHandOverLeavesTheInputSomewhere(t *testing.T) {
	fault := errors.New("fault")
	for k := 1; ; k++ {
		n := newNode(t, map[string]agent.Agent{}, routed("a=n2"))
		n.send("a", "r", "x", "{}")
		i := 0
		n.before = func(string) error {
			if i++; i == k {
				return fault
			}
			return nil
		}
		_, err := n.passOn(t.Context())
		n.before = nil
		if err == nil {
			if k < 8 {
				t.Fatalf("only %d statements", k-1)
			}
			return
		}
		if !errors.Is(err, fault) {
			t.Fatal(err)
		}
		n.want(fmt.Sprint("fault at ", k), append(n.inbox(), n.commands()...), []string{"x pending nowhere"})
		n.settle()
		n.want(fmt.Sprint("after a fault at ", k), n.commands(), []string{"~node 1: a@n2 r x {} hops 1"})
	}
}

// A timer for another node waits here until it is due, and may be cancelled.
func TestTimersForElsewhereWaitHere(t *testing.T) {
	n := newNode(t, one(scripted), routed("b=n2"))
	n.send("a", "r", "go", `{"commands": [{"agent": "b", "run": "r", "type": "t", "in": "1h", "id": "one"}, {"agent": "c@n3", "run": "r", "type": "t", "in": "1h", "id": "two"},
		{"agent": "c@n3", "run": "r", "type": "t", "in": "1h", "id": "three"}, {"agent": "b", "run": "now", "type": "t", "id": "four"}, {"agent": "c@n3", "run": "now", "type": "t", "id": "five"}]}`)
	n.settle()
	n.want("at once", n.commands(), []string{"r 2: c@n3 now pr:n1/d/r/five null hops 1", "r 3: b@n2 now pr:n1/d/r/four null hops 1"})
	n.send("a", "r", "stop", `{"cancel": ["two"]}`)
	n.settle()
	n.exec("UPDATE inbox SET due_us = 1 WHERE run IS NULL")
	n.settle()
	n.want("when due", n.commands()[2:], []string{"~node 1: b@n2 r pr:n1/d/r/one null hops 1", "~node 2: c@n3 r pr:n1/d/r/three null hops 1"})
}

func TestCommandsToNobodyAreRefused(t *testing.T) {
	n := newNode(t, one(scripted), routed("b=n1"))
	for _, to := range []string{"b", "c", "c@n1"} {
		n.send("a", "r-"+to[:1], to, `{"commands": [{"agent": "`+to+`", "run": "r", "type": "t"}]}`)
	}
	n.settle()
	for _, run := range []string{"r-b", "r-c"} {
		if d := n.show(run); d.Status != "paused" && d.Dead != 1 || !strings.Contains(d.LastError, "is not hosted here, and has no route and no node") {
			t.Errorf("run %s is %s: %s", run, d.Status, d.LastError)
		}
	}
}

// A rewind of the run that created a handed-over input withholds it, unless it was shipped.
func TestRewindWithholdsWhatWasHandedOver(t *testing.T) {
	for _, shipped := range []bool{false, true} {
		t.Run(fmt.Sprint("shipped ", shipped), func(t *testing.T) {
			n := newNode(t, one(scripted), quick)
			n.send("a", "r", "one", "{}")
			n.send("a", "r", "two", `{"commands": [{"agent": "b@n2", "run": "far", "type": "t", "in": "1h", "id": "c"}]}`)
			n.settle()
			n.send("b@n2", "far", "other", "{}")
			n.exec("UPDATE inbox SET due_us = 1 WHERE run IS NULL")
			n.settle()
			own := n.value("SELECT ulid FROM branch b JOIN run r ON r.live = b.id WHERE r.name = '~node'")
			want := []string{"~node 1: b@n2 far pr:n1/d/r/c null hops 1", "~node 2: b@n2 far other {} hops 1"}
			n.want("handed over", n.commands(), want)
			if shipped {
				n.ship(own, 1)
			}
			out := n.rewind("r", 1)
			box := outbox.New(n.store, "n1")
			s, err := box.Stats(t.Context(), "")
			if err != nil {
				t.Fatal(err)
			}
			list, _, err := box.List(t.Context(), outbox.Filter{Run: record.NodeRun, States: []string{"withheld"}, Limit: 10})
			if err != nil {
				t.Fatal(err)
			}
			withheld := 0
			for _, it := range n.pending() {
				if it.Key.Branch == own && it.Withheld {
					withheld++
				}
			}
			if out.Shipped+out.Withheld != 1 {
				t.Errorf("the rewind says %d shipped and %d withheld", out.Shipped, out.Withheld)
			}
			if expect := map[bool]int{false: 1, true: 0}[shipped]; int(out.Withheld) != expect || int(s.Withheld) != expect || len(list) != expect || withheld != expect {
				t.Errorf("withheld: %d said the rewind, %d the figures, %d the list, %d the relay's drain; want %d", out.Withheld, s.Withheld, len(list), withheld, expect)
			}
			// Its id can be used again by the new line.
			n.send("a", "r", "three", `{"commands": [{"agent": "b@n2", "run": "far", "type": "t", "in": "1h", "id": "c"}]}`)
			n.settle()
			n.exec("UPDATE inbox SET due_us = 1 WHERE run IS NULL AND ended_us IS NULL")
			n.settle()
			if all := n.commands(); all[len(all)-1] != "~node 3: b@n2 far pr:n1/d/r/c null hops 1" {
				t.Errorf("commands: %s", all)
			}
			// Passed over by the relay, it is still withheld.
			n.ship(own, 3)
			if again, err := box.Stats(t.Context(), ""); err != nil || again.Withheld != s.Withheld {
				t.Errorf("after shipping %+v, %v", again, err)
			}
			if list, _, err := box.List(t.Context(), outbox.Filter{Run: "", States: []string{"withheld"}, Limit: 10}); err != nil || len(list) != int(s.Withheld) {
				t.Errorf("after shipping the list has %d, %v", len(list), err)
			}
		})
	}
}

// A session that ends between the PUBACK and the retiring does not have it sent twice.
func TestSentIsRetiredWhenTheSessionEnds(t *testing.T) {
	n := newNode(t, map[string]agent.Agent{}, routed("b=n2,best-effort"))
	n.send("b", "r", "x", "{}")
	ctx, cancel := context.WithCancel(t.Context())
	if _, err := NewForwarder(n.store, sqlite.Node{Name: "n1"}).Forward(ctx, func(context.Context, *record.Record) error { cancel(); return nil }); err != nil && !errors.Is(err, context.Canceled) {
		t.Fatal(err)
	}
	n.want("inbox", n.inbox(), []string{"x handed-over nowhere: to node n2"})
}

// What belongs to nobody any more waits, and does not keep others from going.
func TestStraysOfNobodyWait(t *testing.T) {
	n := newNode(t, map[string]agent.Agent{}, routed("b=n2", "c=n2"))
	for i := range strayBatch + 1 {
		n.send("b", "r", fmt.Sprint("b", i), "{}")
	}
	n.send("c", "r", "c", "{}")
	n.restart(t, map[string]agent.Agent{}, routed("c=n2"))
	n.settle()
	n.want("commands", n.commands(), []string{"~node 1: c@n2 r c {} hops 1"})
	n.restart(t, map[string]agent.Agent{}, routed("b=n2"))
	n.settle()
	if got := len(n.commands()); got != strayBatch+2 {
		t.Errorf("%d commands after the route is back", got)
	}
}

// A running executor passes on what other processes send, and rings the relay's bell after each.
func TestExecutorPassesOn(t *testing.T) {
	rung := make(chan struct{}, 1)
	o := routed("b=n2")
	o.Poll = time.Millisecond
	o.Notify = func() {
		select {
		case rung <- struct{}{}:
		default:
		}
	}
	n := newNode(t, map[string]agent.Agent{}, o)
	n.start(t)
	n.send("b", "r", "x", "{}")
	receive(t, "the relay's bell", rung)
	n.want("commands", n.commands(), []string{"~node 1: b@n2 r x {} hops 1"})
}

// Commands are made in one place: no other code of the product sets the kind, or calls a way.
func TestOnlyHandOverMakesCommands(t *testing.T) {
	root := moduleRoot()
	made := map[string]int{}
	err := filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() || !strings.HasSuffix(path, ".go") || strings.HasSuffix(path, "_test.go") {
			return err
		}
		file, err := parser.ParseFile(token.NewFileSet(), path, nil, 0)
		if err != nil {
			return err
		}
		name, err := filepath.Rel(root, path)
		if err != nil {
			return err
		}
		ast.Inspect(file, func(n ast.Node) bool {
			if kv, ok := n.(*ast.KeyValueExpr); ok && isCommand(kv.Value) { // record.Record{Kind: record.Command}
				made[name]++
			}
			if as, ok := n.(*ast.AssignStmt); ok && slices.ContainsFunc(as.Rhs, isCommand) { // r.Kind = record.Command
				made[name]++
			}
			return true
		})
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	// internal/record parses what others made.
	if made["executor/handover.go"] != 1 || len(made) != 2 || made["internal/record/cloudevent.go"] != 1 {
		t.Errorf("commands are made in %v", made)
	}
}

func isCommand(e ast.Expr) bool {
	switch e := e.(type) {
	case *ast.SelectorExpr:
		x, ok := e.X.(*ast.Ident)
		return ok && x.Name == "record" && e.Sel.Name == "Command"
	case *ast.Ident:
		return e.Name == "Command"
	}
	return false
}

func moduleRoot() string {
	dir, err := os.Getwd()
	if err != nil {
		panic(err)
	}
	for ; ; dir = filepath.Dir(dir) {
		if _, err := os.Stat(filepath.Join(dir, "go.mod")); err == nil {
			return dir
		}
	}
}

// Whoever looks between any two statements of a hand-over, as the owner's own poll does, finds the input in the inbox or
// in the outbox: in exactly one.
func TestLookDuringAHandOverFindsTheInput(t *testing.T) {
	n := newNode(t, map[string]agent.Agent{}, routed("a=n2"))
	n.send("a", "r", "x", "{}")
	looks := 0
	look := func(string) error {
		looks++
		rows, err := new(look).strays(t.Context(), n.store, "true", 10)
		if found := len(rows) + len(n.commands()); err != nil || found != 1 {
			t.Errorf("look %d: the input is in %d places, %v", looks, found, err)
		}
		return nil
	}
	n.before = look
	n.o.Notify = func() { _ = look("") }
	if _, err := n.passOn(t.Context()); err != nil {
		t.Fatal(err)
	}
	n.before = nil
	if looks < 8 {
		t.Errorf("only %d looks", looks)
	}
	n.want("commands", n.commands(), []string{"~node 1: a@n2 r x {} hops 1"})
}

// An agent that comes back while its input is on its way by a best-effort route gets it: that route may do it twice, and
// never loses.
func TestBestEffortMayBeTwiceAndIsNeverLost(t *testing.T) {
	n := newNode(t, map[string]agent.Agent{}, routed("a=n2,best-effort"))
	n.send("a", "r", "x", "{}")
	sent := 0
	_, err := NewForwarder(n.store, sqlite.Node{Name: "n1"}).Forward(t.Context(), func(context.Context, *record.Record) error {
		sent++
		n.restartBeside(t, one(scripted))
		return nil
	})
	if err != nil || sent != 1 {
		t.Errorf("sent %d, %v", sent, err)
	}
	n.settle()
	n.mustBe("r", "idle", "1")
}

// restartBeside makes the node one with other agents, while something of its former life is still under way.
func (n *node) restartBeside(t *testing.T, agents map[string]agent.Agent) {
	t.Helper()
	n.Executor = New(n.store, "n1", agents, quick)
	if err := n.recover(t.Context()); err != nil {
		t.Fatal(err)
	}
	if _, err := n.passOn(t.Context()); err != nil {
		t.Fatal(err)
	}
}

// left lists the inputs that left for other nodes, in order.
func (n *node) left() string {
	return n.value("SELECT group_concat(input_id, ' ') FROM (SELECT input_id FROM outbox WHERE kind = 2 ORDER BY id)")
}

// An input of a best-effort route that could not be sent is not overtaken by others of its run. Other runs go on.
func TestNothingOvertakesWhatCouldNotBeSent(t *testing.T) {
	n := newNode(t, map[string]agent.Agent{}, routed("b=n2,best-effort"))
	for i := range 3 {
		n.send("b", "r", fmt.Sprint("x", i), "{}")
		n.send("b", "s", fmt.Sprint("y", i), "{}")
	}
	f := NewForwarder(n.store, sqlite.Node{Name: "n1", Epoch: 1})
	var sent []string
	failed := false
	forward := func() {
		t.Helper()
		_, err := f.Forward(t.Context(), func(_ context.Context, r *record.Record) error {
			if !failed {
				failed = true
				return errors.New("no PUBACK")
			}
			sent = append(sent, r.InputID)
			return nil
		})
		if (err != nil) != (len(sent) == 0) {
			t.Fatal(err)
		}
	}
	forward()
	n.send("b", "r", "x3", "{}")
	forward()
	n.want("while it waits", sent, []string{"y0", "y1", "y2"})
	n.exec("UPDATE inbox SET next_us = 1")
	forward()
	n.want("in the end", sent, []string{"y0", "y1", "y2", "x0", "x1", "x2", "x3"})
}

// What goes to a run that is paused before its first step waits behind what it is paused at, whoever sent it; resumed,
// all of it leaves in order.
func TestInputsComeBehindThoseThatWaitAtTheirRun(t *testing.T) {
	o := routed("b=n2")
	o.MaxAttempts = 1
	n := newNode(t, map[string]agent.Agent{"b": agent.Func(func(context.Context, agent.Step) (agent.Effects, error) { return agent.Effects{}, errors.New("no") })}, o)
	n.send("b", "r", "first", "{}")
	n.settle()
	n.mustBe("r", "paused", "null")
	n.restart(t, one(scripted), o)
	n.send("b", "r", "second", "{}")
	n.send("a", "s", "1", `{"commands": [{"agent": "b", "run": "r", "type": "t", "id": "third"}]}`)
	n.settle()
	n.receive(foreign("b", "r", "fourth", "{}"))
	n.settle()
	if got := n.left(); got != "" {
		t.Errorf("%s left", got)
	}
	if _, err := Resume(t.Context(), n.store, "d", "r", ""); err != nil {
		t.Fatal(err)
	}
	n.settle()
	if got := n.left(); got != "first second pr:n1/d/s/third fourth" {
		t.Errorf("%s left", got)
	}
}

// An agent that is back gets what waited for it before what comes then.
func TestInputsComeBehindStrays(t *testing.T) {
	n := newNode(t, map[string]agent.Agent{}, routed("a=n2,best-effort"))
	for i := range 3 {
		n.send("a", "r", fmt.Sprint("x", i), "{}")
	}
	if _, err := Submit(t.Context(), n.store, Input{Tenant: "d", Agent: "a", Run: "q", ID: "timer", Type: "t", Data: []byte("{}"), Source: "cli", In: time.Hour}); err != nil {
		t.Fatal(err)
	}
	n.restart(t, one(scripted), quick)
	n.send("a", "r", "late", "{}")
	n.send("a", "q", "now", "{}") // not behind what is due later
	if got := n.value("SELECT group_concat(name) FROM run"); got != "q" {
		t.Errorf("runs %s have something to do before what waited is given to them", got)
	}
	n.send("a", "s", "1", `{"commands": [{"run": "r", "type": "t", "id": "later", "data": {}}]}`)
	if out := n.send("a", "r", "late", "{}"); !out.Duplicate {
		t.Error("it is not known")
	}
	n.settle()
	n.want("steps", n.stepInputs("r"), []string{"x0", "x1", "x2", "late", "pr:n1/d/s/later"})
	n.want("steps of the other", n.stepInputs("q"), []string{"now"})
}

// A command of a step does not overtake inputs that are about to leave for the same run.
func TestCommandsComeBehindStrays(t *testing.T) {
	n := newNode(t, one(scripted), routed("b=n2"))
	n.send("a", "s", "1", `{"commands": [{"agent": "b", "run": "r", "type": "t", "id": "second"}]}`)
	n.send("b", "r", "first", "{}")
	n.exec("UPDATE inbox SET due_us = 1 WHERE input_id = 'first'") // before
	c := n.claimRun(t, "s")
	if err := n.store.Write(t.Context(), func(ctx context.Context, tx *sqlite.Tx) error {
		_, err := commitStep(ctx, tx, c, n.plan(c), false, 10)
		return err
	}); err != nil {
		t.Fatal(err)
	}
	n.settle()
	if got := n.left(); got != "first pr:n1/d/s/second" {
		t.Errorf("%s left", got)
	}
}

func (n *node) claimRun(t *testing.T, run string) (c *claim) {
	t.Helper()
	n.write(func(ctx context.Context, tx *sqlite.Tx) (err error) {
		id, err := runByName(n, run)
		if err != nil {
			return err
		}
		c, err = claimStep(ctx, tx, id, n.hosted, n.hand())
		return err
	})
	if c == nil {
		t.Fatalf("run %s has nothing to do", run)
	}
	return c
}

// A crowd that waits is passed in looks of bounded length, which get to everything.
func TestALookIsBounded(t *testing.T) {
	n := newNode(t, map[string]agent.Agent{}, routed("b=n2,best-effort", "c=n2"))
	n.send("b", "r", "x", "{}")
	n.exec(`WITH RECURSIVE k (n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM k WHERE n < ?) INSERT INTO inbox (tenant, run_name, agent, input_id, type, source, arrived_us, due_us, data)
		SELECT tenant, run_name || n, agent, input_id || n, type, source, arrived_us, due_us, data FROM inbox, k`, strayLook)
	n.send("c", "r", "y", "{}")
	looks := 0
	for ; n.left() == ""; looks++ {
		if looks == 10 {
			t.Fatal("it does not get there")
		}
		if _, err := n.passOn(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	if looks != 2 {
		t.Errorf("it took %d looks", looks)
	}
	n.send("c", "r", "z", "{}")
	for looks = 0; n.left() == "y"; looks++ {
		if looks == 10 {
			t.Fatal("it does not begin anew")
		}
		if _, err := n.passOn(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
}

// One input that the database refuses to pass on is a dead letter; the others of its batch go.
func TestOneBadStrayDoesNotHoldUpTheOthers(t *testing.T) {
	n := newNode(t, map[string]agent.Agent{}, routed("b=n2"))
	n.exec("CREATE TRIGGER refuse BEFORE INSERT ON outbox WHEN NEW.input_id = 'bad' BEGIN SELECT RAISE(ABORT, 'no'); END")
	for _, id := range []string{"1", "bad", "3"} {
		n.send("b", "r"+id, id, "{}")
	}
	n.settle()
	if got := n.left(); got != "1 3" {
		t.Errorf("%s left", got)
	}
	if got := n.value("SELECT outcome || ' ' || reason FROM inbox WHERE input_id = 'bad'"); !strings.HasPrefix(got, "dead cannot be passed on: ") {
		t.Errorf("it is %s", got)
	}
}

// One id for two nodes, or here and there, is not taken for one input in silence.
func TestOneIDForTwoNodesIsAConflict(t *testing.T) {
	n := newNode(t, one(scripted), quick)
	n.send("b@n2", "r", "k", "{}")
	if _, err := n.trySend("b@n3", "r", "k", "{}"); !errors.Is(err, ErrConflict) {
		t.Errorf("for another node: %v", err)
	}
	if out := n.send("b@n2", "r", "k", "{}"); !out.Duplicate {
		t.Error("for the same node it is no duplicate")
	}
	n.send("a@n1", "s", "k", "{}")
	if out := n.send("a", "s", "k", "{}"); !out.Duplicate {
		t.Error("this node's name makes another input")
	}
	if _, err := n.trySend("a@n2", "s", "k", "{}"); !errors.Is(err, ErrConflict) {
		t.Errorf("here, and then elsewhere: %v", err)
	}
}

// A command's id that was used while its agent was here is known when it has a route.
func TestIDsOutliveTheMoveOfAnAgent(t *testing.T) {
	n := newNode(t, map[string]agent.Agent{"a": agent.Func(scripted), "b": agent.Func(scripted)}, quick)
	n.send("a", "s", "1", `{"commands": [{"agent": "b", "run": "r", "type": "t", "id": "k"}]}`)
	n.settle()
	n.exec("UPDATE run SET name = 'other' WHERE name = 'r'") // so that its run has no step here
	n.restart(t, one(scripted), routed("b=n2"))
	n.send("a", "s", "2", `{"commands": [{"agent": "b", "run": "r", "type": "t", "id": "k"}, {"agent": "b", "run": "r", "type": "t", "id": "l"}]}`)
	n.settle()
	if got := n.left(); got != "pr:n1/d/s/l" {
		t.Errorf("%s left", got)
	}
}

// After a failure the next look begins at the front again: what failed is the first to be tried.
func TestAFailedBatchIsTheNextToBeTried(t *testing.T) {
	n := newNode(t, map[string]agent.Agent{}, routed("b=n2"))
	for i := range strayBatch + 1 {
		n.send("b", fmt.Sprint("r", i), fmt.Sprint("x", i), "{}")
	}
	fault := errors.New("fault")
	n.before = func(string) error { return fault }
	if _, err := n.passOn(t.Context()); !errors.Is(err, fault) {
		t.Fatal(err)
	}
	n.before = nil
	if _, err := n.passOn(t.Context()); err != nil {
		t.Fatal(err)
	}
	if got := n.left(); !strings.HasPrefix(got, "x0 x1 ") {
		t.Errorf("then left %s", got)
	}
}
