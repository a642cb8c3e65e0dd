package executor

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"postrider/internal/agent"
	"postrider/internal/record"
	"postrider/internal/sqlite"
)

// moody is scripted, but fails inputs by their ids: terminal or retryable, until it is told otherwise.
type moody map[string]agent.Code

func (m moody) Step(ctx context.Context, s agent.Step) (agent.Effects, error) {
	if s.Input != nil && m[s.Input.ID] != "" {
		return agent.Effects{}, &agent.Error{Code: m[s.Input.ID], Message: "no " + s.Input.ID}
	}
	return scripted(ctx, s)
}

func moodyNode(t *testing.T, m moody, o Options) *node {
	t.Helper()
	return newNode(t, map[string]agent.Agent{"a": m, "b": agent.Func(scripted)}, o)
}

// row is the newest inbox row of an input.
func (n *node) row(run, id string) int64 {
	n.t.Helper()
	row, err := strconv.ParseInt(n.value("SELECT max(id) FROM inbox WHERE run_name = ? AND input_id = ?", run, id), 10, 64)
	if err != nil {
		n.t.Fatalf("run %s has no input %s: %v", run, id, err)
	}
	return row
}

func (n *node) requeue(rows ...int64) []Handled {
	n.t.Helper()
	list, err := Requeue(context.Background(), n.store, Selection{Tenant: "d", Rows: rows}, "")
	if err != nil {
		n.t.Fatalf("requeue %v: %v", rows, err)
	}
	return list
}

func (n *node) drop(rows ...int64) {
	n.t.Helper()
	if _, err := Drop(context.Background(), n.store, Selection{Tenant: "d", Rows: rows}, ""); err != nil {
		n.t.Fatalf("drop %v: %v", rows, err)
	}
}

// inputs lists the ids and states of a run's inputs, all of them.
func (n *node) inputs(run string) string {
	n.t.Helper()
	list, more, err := Inputs(context.Background(), n.store, InputFilter{Tenant: "d", Run: run, States: InputStates, Limit: 100})
	if err != nil || more {
		n.t.Fatalf("inputs of %s: more %t, %v", run, more, err)
	}
	var out []string
	for _, in := range list {
		out = append(out, in.ID+" "+in.State)
	}
	return strings.Join(out, ", ")
}

func (n *node) audited(t *testing.T, want ...string) {
	t.Helper()
	if got := n.value("SELECT group_concat(action || ' ' || subject || ' ' || COALESCE(detail, ''), ', ') FROM (SELECT * FROM audit ORDER BY id)"); got != strings.Join(want, ", ") {
		t.Errorf("audit: %s, want %s", got, strings.Join(want, ", "))
	}
}

func TestRequeuedInputKeepsIDAndOrder(t *testing.T) {
	m := moody{"1": agent.Terminal, "2": agent.Terminal}
	n := moodyNode(t, m, quick)
	for _, id := range []string{"1", "2"} {
		n.send("a", "r", id, "{}")
	}
	n.settle()
	if got := n.inputs("r"); got != "1 dead, 2 dead" {
		t.Fatalf("inputs: %s", got)
	}
	clear(m)
	n.send("a", "r", "3", "{}")
	one, two := n.row("r", "1"), n.row("r", "2")
	n.requeue(two)
	if out := n.send("a", "r", "2", "{}"); !out.Duplicate {
		t.Error("a requeued input's id is taken again")
	}
	n.requeue(one)
	if got := n.inputs("r"); got != "1 pending, 2 pending, 3 pending" {
		t.Errorf("inputs: %s", got)
	}
	n.settle()
	if got := strings.Join(n.stepInputs("r"), " "); got != "1 2 3" {
		t.Errorf("inputs came as %s", got)
	}
	n.audited(t, fmt.Sprintf("requeue d/r input %d 2 ", two), fmt.Sprintf("requeue d/r input %d 1 ", one))
	if out := n.send("a", "r", "1", "{}"); !out.Duplicate {
		t.Error("a consumed input's id is taken again")
	}

	// From outside: a rewind does not give them again, and their ids stay taken.
	n.rewind("r", 1)
	n.settle()
	if got := n.inputs("r"); got != "1 consumed, 2 consumed, 3 consumed" {
		t.Errorf("after a rewind: %s", got)
	}
}

// A requeued command of a step that a rewind keeps is pending again when its own step is taken back, as any other.
func TestRequeuedCommandIsRewoundWithItsSteps(t *testing.T) {
	m := moody{}
	n := moodyNode(t, m, quick)
	n.send("a", "r", "1", `{"commands": [{"type": "t", "id": "c", "data": {}}]}`)
	id := idPrefix + "n1/d/r/c"
	m[id] = agent.Terminal
	n.settle()
	clear(m)
	n.requeue(n.row("r", id))
	n.settle()
	n.rewind("r", 1)
	if got := n.inputs("r"); got != "1 consumed, "+id+" pending" {
		t.Errorf("after a rewind to its creator: %s", got)
	}
	n.settle()
	n.rewind("r", 0)
	if got := n.inputs("r"); got != "1 consumed, "+id+" consumed" || n.value("SELECT count(*) FROM seen WHERE input_id = ?", id) != "0" {
		t.Errorf("after a rewind of its creator: %s", got)
	}
}

func TestRequeueStartsAttemptsAnew(t *testing.T) {
	m := moody{"1": agent.Retryable}
	o := quick
	o.MaxAttempts, o.DeadLetter = 3, true
	n := moodyNode(t, m, o)
	n.send("a", "r", "1", "{}")
	n.settle()
	row := n.row("r", "1")
	n.requeue(row)
	in, err := ReadInput(t.Context(), n.store, row)
	if err != nil || in.Attempts != 0 || in.LastError != "" || in.Reason != "" || in.NextUS != 0 || in.State != InputPending {
		t.Errorf("%+v, %v", in, err)
	}
	n.settle()
	if in, err = ReadInput(t.Context(), n.store, row); err != nil || in.Attempts != 3 || in.State != InputDead || !strings.Contains(in.Reason, "no 1") {
		t.Errorf("%+v, %v", in, err)
	}
}

// What expired would do so again: an operator who wants it gets it.
func TestRequeuedInputDoesNotExpireAgain(t *testing.T) {
	n := newNode(t, one(scripted), quick)
	n.send("a", "r", "1", "{}")
	n.exec("UPDATE inbox SET expires_us = 1")
	n.settle()
	if got := n.inputs("r"); got != "1 dead" {
		t.Fatalf("inputs: %s", got)
	}
	if list := n.requeue(n.row("r", "1")); !list[0].NoExpiry {
		t.Errorf("%+v", list)
	}
	n.settle()
	n.mustBe("r", "idle", "1")
}

func TestRequeueRefusesWhatCannotBeGiven(t *testing.T) {
	m := moody{"dead": agent.Terminal}
	n := moodyNode(t, m, quick)
	for _, run := range []string{"over", "gone", "r"} {
		n.send("a", run, "dead", "{}")
	}
	n.settle()
	n.send("a", "over", "end", `{"next": "done"}`)
	n.send("a", "gone", "end", `{"next": "fail"}`)
	// Commands that their runs cannot take: the id has other content, and the run another agent.
	n.send("a", "r", "x1", `{"commands": [{"run": "r2", "type": "t", "id": "c", "data": {}}]}`)
	n.settle()
	n.rewind("r2", 0) // its consumed input keeps the id
	n.send("a", "r", "x2", `{"commands": [{"run": "r2", "type": "t", "id": "c", "data": {"next": "wait"}}, {"agent": "b", "run": "r2", "type": "t", "id": "d", "data": {}}]}`)
	n.settle()
	m["stuck"] = agent.Retryable
	n.send("a", "p", "stuck", "{}")
	n.settle()
	n.send("a", "r", "later", "{}")
	if _, err := Receive(t.Context(), n.store, []record.Inbound{
		{Tenant: "d", Agent: "a", Run: "r", Type: record.TypeRaw, Source: "mqtt:x", Data: []byte(`{"fine": true}`), Fault: "is no CloudEvent"},
		{Tenant: "d", Agent: "a", Run: "r", ID: "pr:x", Type: "t", Source: "mqtt:x", Data: []byte(`{}`)},
	}); err != nil {
		t.Fatal(err)
	}
	before := dump(t, n.store, false)
	for _, c := range []struct {
		row  int64
		is   error
		want string
	}{
		{n.row("over", "dead"), ErrConflict, "run over is done and takes no input"},
		{n.row("gone", "dead"), ErrConflict, "run gone is failed and takes no input"},
		{n.row("over", "end"), ErrConflict, "is consumed, not dead"},
		{n.row("r", "later"), ErrConflict, "is pending, not dead"},
		{n.row("p", "stuck"), ErrConflict, "run p is paused at it"},
		{n.row("r2", idPrefix+"n1/d/r/c"), ErrConflict, "belongs to another input of run r2"},
		{n.row("r2", idPrefix+"n1/d/r/d"), ErrConflict, "is for agent b, and run r2 belongs to agent a"},
		{n.row("r", ""), ErrConflict, "is malformed, and no agent can be given it: is no CloudEvent"},
		{n.row("r", "pr:x"), ErrConflict, "is malformed, and no agent can be given it: id: "},
		{1 << 40, ErrNotFound, "there is no input 1099511627776"},
	} {
		if _, err := Requeue(t.Context(), n.store, Selection{Tenant: "d", Rows: []int64{n.row("r", "dead"), c.row}}, ""); !errors.Is(err, c.is) || !strings.Contains(err.Error(), c.want) {
			t.Errorf("row %d: %v, want %q", c.row, err, c.want)
		}
	}
	if _, err := Requeue(t.Context(), n.store, Selection{Tenant: "e", Rows: []int64{n.row("r", "dead")}}, ""); !errors.Is(err, ErrNotFound) {
		t.Errorf("of another tenant: %v", err)
	}
	for _, which := range []Selection{{}, {Tenant: "d"}} {
		if _, err := Requeue(t.Context(), n.store, which, ""); !errors.Is(err, ErrInvalid) {
			t.Errorf("of nothing: %v", err)
		}
		if _, err := Drop(t.Context(), n.store, which, ""); !errors.Is(err, ErrInvalid) {
			t.Errorf("drop of nothing: %v", err)
		}
	}
	mustEqual(t, "after refusals", dump(t, n.store, false), before)

	// Of many, those that can be.
	clear(m)
	list, err := Requeue(t.Context(), n.store, Selection{Tenant: "d", All: true}, "")
	refused := 0
	for _, h := range list {
		if h.Refused != nil {
			refused++
		}
	}
	if err != nil || len(list) != 7 || refused != 6 {
		t.Errorf("all: %+v, %v", list, err)
	}
	n.settle()
	if got := n.inputs("r"); !strings.Contains(got, "dead consumed") {
		t.Errorf("inputs: %s", got)
	}
}

// A dead letter that waits for nobody's agent goes on when somebody has it.
func TestRequeueOfAnInputWithoutARunMakesIt(t *testing.T) {
	n := moodyNode(t, moody{}, quick)
	in := []record.Inbound{{Tenant: "d", Agent: "c", Run: "r", ID: "1", Type: "t", Source: "mqtt:x", Data: []byte(`{}`)}}
	if out, err := Receive(t.Context(), n.store, in); err != nil || out[0] != record.DeadInput {
		t.Fatalf("%v, %v", out, err)
	}
	row := n.row("r", "1")
	if _, err := Requeue(t.Context(), n.store, Selection{Rows: []int64{row}}, ""); !errors.Is(err, ErrConflict) || !strings.Contains(err.Error(), "nowhere to go") {
		t.Errorf("without the agent: %v", err)
	}
	n.restart(t, map[string]agent.Agent{"c": agent.Func(scripted)}, quick)
	n.requeue(row)
	n.settle()
	n.mustBe("r", "idle", "1")
	if in, err := FindInput(t.Context(), n.store, "d", "r", "1"); err != nil || in.State != InputConsumed || in.Row != row {
		t.Errorf("%+v, %v", in, err)
	}
}

// Routes in a circle end an input as a dead letter. Once one of them is mended, it is handed over, and the node that passed
// it on before takes it.
func TestRequeueAfterACircleIsMended(t *testing.T) {
	other := newNode(t, one(scripted), routed("b=n2")) // each is n1, and calls the other one n2
	other.receive(fromNode("n2", 1, 1, "b", "r", "x", "{}", maxHops-1))
	other.settle()
	other.want("of the other node", other.commands(), []string{"~node 1: b@n2 r x {} hops 8"})

	n := newNode(t, one(scripted), routed("b=n2"))
	n.receive(fromNode("n2", 1, 1, "b", "r", "x", "{}", maxHops))
	n.settle()
	n.want("inbox", n.inbox(), []string{"x dead nowhere: was handed over 8 times; the routes of the nodes go round in a circle"})
	n.requeue(n.row("r", "x"))
	n.settle()
	n.want("inbox", n.inbox(), []string{"x handed-over nowhere: to node n2"})
	n.want("commands", n.commands(), []string{"~node 1: b@n2 r x {} hops 8"})

	other.restart(t, map[string]agent.Agent{"b": agent.Func(scripted)}, quick)
	if out := other.receive(fromNode("n2", 2, 1, "b", "r", "x", "{}", maxHops)); out[0] != record.Stored {
		t.Errorf("the mended node says it is %s", out)
	}
	other.settle()
	other.mustBe("r", "idle", "1")
}

// One without a run overtakes no others that are not at their run yet.
func TestRequeueGoesBehindStrays(t *testing.T) {
	n := newNode(t, one(scripted), quick)
	for i, outcome := range []any{"dead", nil, "dead"} {
		n.exec(`INSERT INTO inbox (tenant, run_name, agent, input_id, type, source, arrived_us, due_us, ended_us, outcome, reason, data)
			VALUES ('d', ?1, 'a', ?2, 't', 'cli', 1, ?3, iif(?4 IS NULL, NULL, 1), ?4, iif(?4 IS NULL, NULL, 'x'), x'7b7d')`,
			[]string{"other", "r", "r"}[i], fmt.Sprint(i), i+1, outcome)
	}
	n.requeue(1, 3)
	n.want("inbox", n.inbox(), []string{"0 pending here", "1 pending nowhere", "2 pending nowhere"})
	n.settle()
	if got := strings.Join(append(n.stepInputs("r"), n.stepInputs("other")...), " "); got != "1 2 0" {
		t.Errorf("inputs came as %s", got)
	}
}

// Without its memory, an id may come again, and stand for another input even if that says the same.
func TestRequeueCountsAnIDOnce(t *testing.T) {
	m := moody{"x": agent.Terminal}
	n := moodyNode(t, m, quick)
	n.send("a", "r", "x", "{}")
	n.settle()
	clear(m)
	n.exec("DELETE FROM seen") // the window passed
	n.send("a", "r", "x", "{}")
	n.settle()
	_, err := Requeue(t.Context(), n.store, Selection{Tenant: "d", Rows: []int64{1}}, "")
	if !errors.Is(err, ErrConflict) || !strings.Contains(err.Error(), "belongs to another input") {
		t.Errorf("requeue: %v", err)
	}
	n.settle()
	if got := strings.Join(n.stepInputs("r"), " "); got != "x" {
		t.Errorf("steps took %s", got)
	}
}

// inQueue is a context that says when the writer has what was submitted with it.
type inQueue struct {
	context.Context
	asked atomic.Int64
	yes   chan struct{}
}

func (q *inQueue) Done() <-chan struct{} {
	if q.asked.Add(1) == 2 { // before it is in the queue, and when it is
		close(q.yes)
	}
	return q.Context.Done()
}

// A unit runs again when a neighbour in its group fails. What it answers is of its last time.
func TestOperatorsAreAnsweredOnceBesideAFailingNeighbour(t *testing.T) {
	m := moody{"1": agent.Terminal, "2": agent.Terminal}
	n := moodyNode(t, m, quick)
	n.send("a", "r", "1", "{}")
	n.send("a", "r", "2", "{}")
	n.settle()
	requeued := 0
	n.before = func(query string) error { // only the writer calls it
		if strings.HasPrefix(query, "UPDATE inbox SET run = ?2") {
			requeued++
		}
		return nil
	}
	holds, free := make(chan struct{}), make(chan struct{})
	broken, done := errors.New("broken"), make(chan error, 2)
	go func() {
		done <- n.store.Write(context.Background(), func(context.Context, *sqlite.Tx) error { close(holds); <-free; return nil })
	}()
	receive(t, "the writer is held", holds)
	var list []Handled
	requeue := &inQueue{Context: context.Background(), yes: make(chan struct{})}
	neighbour := &inQueue{Context: context.Background(), yes: make(chan struct{})}
	answer := make(chan error, 1)
	go func() {
		var err error
		list, err = Requeue(requeue, n.store, Selection{Tenant: "d", Rows: []int64{n.row("r", "1"), n.row("r", "2")}}, "")
		answer <- err
	}()
	receive(t, "the requeue is in the queue", requeue.yes)
	go func() {
		done <- n.store.Write(neighbour, func(context.Context, *sqlite.Tx) error { return broken })
	}()
	receive(t, "its neighbour is in the queue", neighbour.yes)
	close(free)
	if err := receive(t, "the requeue is answered", answer); err != nil || len(list) != 2 || list[0].ID != "1" || list[1].ID != "2" {
		t.Errorf("%+v, %v", list, err)
	}
	if err := errors.Join(receive(t, "the first unit", done), receive(t, "the neighbour", done)); !errors.Is(err, broken) {
		t.Errorf("the neighbour says %v", err)
	}
	if requeued != 4 {
		t.Errorf("%d inputs were requeued, want 2, twice", requeued)
	}
	n.audited(t, fmt.Sprintf("requeue d/r input %d 1 ", n.row("r", "1")), fmt.Sprintf("requeue d/r input %d 2 ", n.row("r", "2")))
}

// Dead letters of all tenants are handled in batches too, each of them once: by tenant, then in order of arrival.
func TestDeadLettersOfAllTenantsAreHandledOnce(t *testing.T) {
	n := newNode(t, one(scripted), quick)
	const many = 2*operatorBatch + 50
	for i := range many {
		n.exec(`INSERT INTO inbox (tenant, run_name, agent, input_id, type, source, arrived_us, due_us, ended_us, outcome, reason, data)
			VALUES (?, 'r', 'a', ?, 't', 'cli', 1, 1, 1, 'dead', 'x', x'7b7d')`, []string{"e", "d", "f"}[i%3], fmt.Sprint(i))
	}
	list, err := Drop(t.Context(), n.store, Selection{All: true}, "")
	if err != nil || len(list) != many {
		t.Fatalf("%d dropped, %v", len(list), err)
	}
	for i, h := range list[1:] {
		if before := list[i]; h.Tenant < before.Tenant || h.Tenant == before.Tenant && h.Row <= before.Row {
			t.Fatalf("%+v behind %+v", h, before)
		}
	}
	if got := n.value("SELECT count(*) FROM inbox WHERE outcome = 'dead'"); got != "0" {
		t.Errorf("%s are left", got)
	}
}

// An input that comes before the one its run waits to try again does not take over that one's attempts.
func TestRequeueBeforeAnInputThatIsTriedAgain(t *testing.T) {
	m := moody{"1": agent.Terminal, "2": agent.Retryable}
	n := moodyNode(t, m, Options{BackoffMin: time.Hour})
	n.send("a", "r", "1", "{}")
	n.send("a", "r", "2", "{}")
	n.settle()
	n.mustBe("r", "waiting", "")
	clear(m)
	n.requeue(n.row("r", "1"))
	if d := n.show("r"); d.Attempts != 0 || d.Status != "ready" {
		t.Errorf("%+v", d.RunInfo)
	}
	n.settle()
	if got := strings.Join(n.stepInputs("r"), " "); got != "1 2" {
		t.Errorf("inputs came as %s", got)
	}
}

func TestManyAreRequeuedAndDroppedInBatches(t *testing.T) {
	n := newNode(t, one(scripted), quick)
	const many = 2*operatorBatch + 5
	for i := range many {
		n.send("a", fmt.Sprint("r", i%3), fmt.Sprint(i), "{}")
	}
	n.exec("UPDATE inbox SET ended_us = 1, outcome = 'dead', reason = 'x'")
	list, err := Drop(t.Context(), n.store, Selection{Tenant: "d", Run: "r1"}, "")
	if err != nil || len(list) != many/3 {
		t.Fatalf("%d dropped, %v", len(list), err)
	}
	list, err = Requeue(t.Context(), n.store, Selection{All: true}, "")
	if err != nil || len(list) != many-many/3 {
		t.Fatalf("%d requeued, %v", len(list), err)
	}
	n.settle()
	if got := n.value("SELECT count(*) FROM checkpoint WHERE step > 0"); got != fmt.Sprint(many-many/3) {
		t.Errorf("%s steps", got)
	}
}

func TestDroppedInputIsGivenUp(t *testing.T) {
	m := moody{"dead": agent.Terminal, "stuck": agent.Retryable}
	n := moodyNode(t, m, quick)
	for _, id := range []string{"0", "dead", "stuck", "next"} {
		n.send("a", "r", id, "{}")
	}
	n.settle()
	n.mustBe("r", "paused", "1")
	if got := n.inputs("r"); got != "0 consumed, dead dead, stuck paused, next pending" {
		t.Fatalf("inputs: %s", got)
	}
	if _, err := Drop(t.Context(), n.store, Selection{Rows: []int64{n.row("r", "next"), n.row("r", "0")}}, ""); !errors.Is(err, ErrConflict) {
		t.Errorf("drop of a consumed input: %v", err)
	}
	n.drop(n.row("r", "dead"))
	if _, err := Drop(t.Context(), n.store, Selection{Tenant: "d", Rows: []int64{n.row("r", "stuck")}}, "broken"); err != nil {
		t.Fatal(err)
	}
	n.drop(n.row("r", "stuck"))
	n.settle()
	n.mustBe("r", "idle", "2")
	if got := n.inputs("r"); got != "0 consumed, dead dropped, stuck dropped, next consumed" {
		t.Errorf("inputs: %s", got)
	}
	if got := strings.Join(n.exported("r"), ", "); got != "1 postrider.run.started, 2 postrider.run.paused, 3 postrider.run.resumed" {
		t.Errorf("records: %s", got)
	}
	n.audited(t, fmt.Sprintf("drop d/r input %d dead by an operator; dead: agent says terminal: no dead", n.row("r", "dead")),
		fmt.Sprintf("drop d/r input %d stuck broken", n.row("r", "stuck")))
	for _, id := range []string{"dead", "stuck"} {
		if out := n.send("a", "r", id, "{}"); !out.Duplicate {
			t.Errorf("the id of dropped input %s is taken again", id)
		}
		if in, err := FindInput(t.Context(), n.store, "d", "r", id); err != nil || in.State != InputDropped || in.Reason == "" {
			t.Errorf("%+v, %v", in, err)
		}
	}
	n.rewind("r", 0)
	n.settle()
	if got := n.inputs("r"); got != "0 consumed, dead dropped, stuck dropped, next consumed" {
		t.Errorf("after a rewind: %s", got)
	}
}

// The step in hand with a dropped input changes nothing, and its run goes on with the next input.
func TestDropFencesTheStepInHand(t *testing.T) {
	n := newNode(t, one(scripted), quick)
	n.send("a", "r", "1", `{"events": [{"type": "e"}]}`)
	n.send("a", "r", "2", "{}")
	c, plan := n.claimed(t)
	other := n.second(t)
	if _, err := Drop(t.Context(), other, Selection{Tenant: "d", Rows: []int64{n.row("r", "1")}}, ""); err != nil {
		t.Fatal(err)
	}
	err := n.store.Write(t.Context(), func(ctx context.Context, tx *sqlite.Tx) error {
		_, err := commitStep(ctx, tx, c, plan, false, 10)
		return err
	})
	if !errors.Is(err, errFenced) {
		t.Errorf("the late commit: %v", err)
	}
	if err := n.store.Write(t.Context(), func(ctx context.Context, tx *sqlite.Tx) error {
		return failStep(ctx, tx, c, verdict{reason: "x", status: "paused", countsAsOf: 5})
	}); !errors.Is(err, errFenced) {
		t.Errorf("the late failure: %v", err)
	}
	n.settle()
	if got := n.inputs("r"); got != "1 dropped, 2 consumed" {
		t.Errorf("inputs: %s", got)
	}
	n.mustBe("r", "idle", "1")
}

// The agent that works on a dropped input is told to stop: its run does not wait for it.
func TestDropTellsTheAgentToStop(t *testing.T) {
	asked, told := make(chan string, 4), make(chan error, 1)
	n := newNode(t, one(func(ctx context.Context, s agent.Step) (agent.Effects, error) {
		asked <- s.Input.ID
		if s.Input.ID == "1" {
			<-ctx.Done()
			told <- context.Cause(ctx)
			return agent.Effects{}, ctx.Err()
		}
		return scripted(ctx, s)
	}), Options{Poll: time.Millisecond, Grace: time.Millisecond})
	n.send("a", "r", "1", "{}")
	n.send("a", "r", "2", "{}")
	n.send("a", "busy", "3", "{}")
	n.start(t)
	for waits := map[string]bool{"1": true, "3": true}; len(waits) > 0; {
		delete(waits, receive(t, "both runs are asked", asked))
	}
	if _, err := Drop(t.Context(), n.second(t), Selection{Tenant: "d", Rows: []int64{n.row("r", "1")}}, ""); err != nil {
		t.Fatal(err)
	}
	if err := receive(t, "it is told", told); !errors.Is(err, errRewound) {
		t.Errorf("it is told: %v", err)
	}
	if id := receive(t, "the next input", asked); id != "2" {
		t.Errorf("then %s", id)
	}
	eventually(t, "the step", func() bool { return n.inputs("r") == "1 dropped, 2 consumed" })
	if d := n.show("r"); d.Attempts != 0 {
		t.Errorf("it has %d attempts", d.Attempts)
	}
}

func TestResumeHasAPausedRunGoOn(t *testing.T) {
	m := moody{"1": agent.Retryable}
	o := quick
	o.MaxContinue = 3
	n := moodyNode(t, m, o)
	n.send("a", "r", "1", "{}")
	n.send("a", "r", "2", "{}")
	n.send("a", "c", "1", "{}")
	delete(m, "1")
	n.settle()
	m["1"] = agent.Retryable
	n.send("a", "p", "1", "{}")
	n.settle()
	n.mustBe("p", "paused", "")
	out, err := Resume(t.Context(), n.store, "d", "p", "mended")
	if err != nil || out.Was != "paused" || out.Step != 0 || out.LSN != 3 {
		t.Fatalf("%+v, %v", out, err)
	}
	if _, err := Resume(t.Context(), n.store, "d", "p", ""); !errors.Is(err, ErrConflict) || !strings.Contains(err.Error(), "run p is ready, not paused") {
		t.Errorf("again: %v", err)
	}
	if in, err := FindInput(t.Context(), n.store, "d", "p", "1"); err != nil || in.Attempts != 0 || in.State != InputPending {
		t.Errorf("%+v, %v", in, err)
	}
	n.settle() // all attempts again
	if d := n.show("p"); d.Status != "paused" || d.Attempts != 5 {
		t.Errorf("%+v", d.RunInfo)
	}
	clear(m)
	if _, err := Resume(t.Context(), n.store, "d", "p", ""); err != nil {
		t.Fatal(err)
	}
	n.settle()
	n.mustBe("p", "idle", "1")
	if got := n.value("SELECT group_concat(CAST(data AS TEXT)) FROM outbox WHERE type = ?", record.TypeRunResumed); got != `{"reason":"mended"},{"reason":"by an operator"}` {
		t.Errorf("events: %s", got)
	}
	n.audited(t, "resume d/p mended", "resume d/p by an operator")
	n.rewind("p", 0)
	n.settle()
	n.mustBe("p", "idle", "null")
}

// Steps without input are counted anew.
func TestResumeAfterTooManyContinues(t *testing.T) {
	o := quick
	o.MaxContinue = 3
	n := newNode(t, one(func(ctx context.Context, s agent.Step) (agent.Effects, error) {
		e, err := scripted(ctx, s)
		if e.Next = agent.Continue; s.Number >= 5 {
			e.Next = agent.Wait
		}
		return e, err
	}), o)
	n.send("a", "r", "1", "{}")
	n.settle()
	n.mustBe("r", "paused", "3")
	if _, err := Resume(t.Context(), n.store, "d", "r", ""); err != nil {
		t.Fatal(err)
	}
	n.settle()
	n.mustBe("r", "idle", "5")
}

func TestReopenedRunTakesInputs(t *testing.T) {
	n := newNode(t, one(scripted), quick)
	n.send("a", "f", "1", `{"next": "fail"}`)
	n.send("a", "r", "1", "{}")
	n.send("a", "r", "2", `{"next": "done", "commands": [{"type": "t", "id": "c", "data": {}}]}`)
	n.send("a", "r", "3", "{}")
	n.settle()
	n.mustBe("r", "done", "2")
	command := idPrefix + "n1/d/r/c"
	if got := n.inputs("r"); got != "1 consumed, 2 consumed, 3 pending, "+command+" dead" {
		t.Fatalf("inputs: %s", got)
	}
	if in, err := FindInput(t.Context(), n.store, "d", "r", "3"); err != nil || in.Reason != "its run is done" {
		t.Errorf("%+v, %v", in, err)
	}
	out, err := Reopen(t.Context(), n.store, "d", "r", "not yet")
	if err != nil || out.Was != "done" || out.Step != 2 {
		t.Fatalf("%+v, %v", out, err)
	}
	if _, err := Reopen(t.Context(), n.store, "d", "r", ""); !errors.Is(err, ErrConflict) || !strings.Contains(err.Error(), "run r is ready, not done") {
		t.Errorf("again: %v", err)
	}
	if _, err := Reopen(t.Context(), n.store, "d", "f", ""); err != nil {
		t.Errorf("of a failed run: %v", err)
	}
	n.requeue(n.row("r", command))
	n.send("a", "r", "4", "{}")
	n.settle()
	if got := strings.Join(n.stepInputs("r"), " "); got != "1 2 3 "+command+" 4" {
		t.Errorf("inputs came as %s", got)
	}
	n.mustBe("r", "idle", "5")
	n.mustBe("f", "idle", "1")
	if got := strings.Join(n.exported("r"), ", "); got != "1 postrider.run.started, 2 postrider.run.done, 3 postrider.run.resumed" {
		t.Errorf("records: %s", got)
	}
	if got := n.value("SELECT CAST(data AS TEXT) FROM outbox WHERE type = ?", record.TypeRunResumed); got != `{"reason":"reopened: not yet"}` {
		t.Errorf("event: %s", got)
	}

	// A rewind past the end goes on; one to the step that ended it is at its end again, and can be reopened again.
	n.rewind("r", 4)
	n.settle()
	n.mustBe("r", "idle", "4")
	n.rewind("r", 2)
	n.mustBe("r", "done", "2")
	if got := n.inputs("r"); got != "1 consumed, 2 consumed, 3 consumed, "+command+" pending, 4 consumed" {
		t.Errorf("inputs: %s", got)
	}
	if _, err := Reopen(t.Context(), n.store, "d", "r", ""); err != nil {
		t.Fatal(err)
	}
	n.settle()
	n.mustBe("r", "idle", "3")
	n.rewind("r", 1)
	n.settle()
	n.mustBe("r", "idle", "1")
}

func TestResumeAndReopenRefuse(t *testing.T) {
	n := newNode(t, one(scripted), quick)
	n.send("a", "r", "1", "{}")
	n.settle()
	n.write(func(ctx context.Context, tx *sqlite.Tx) error {
		_, err := nodeHead(ctx, tx, "d")
		return err
	})
	before := dump(t, n.store, false)
	for name, do := range map[string]func(ctx context.Context, store *sqlite.Store, tenant, run, reason string) (Resumed, error){"resume": Resume, "reopen": Reopen} {
		for _, c := range []struct {
			tenant, run, reason string
			is                  error
			want                string
		}{
			{"d", "nobody", "", ErrNotFound, "tenant d has no run nobody"},
			{"e", "r", "", ErrNotFound, "tenant e has no run r"},
			{"d", record.NodeRun, "", ErrNotFound, "has no run ~node"},
			{"d", "r", "", ErrConflict, "run r is idle, not "},
			{"d", "r", "a\nb", ErrInvalid, "invalid reason"},
		} {
			if _, err := do(t.Context(), n.store, c.tenant, c.run, c.reason); !errors.Is(err, c.is) || !strings.Contains(err.Error(), c.want) {
				t.Errorf("%s %+v: %v", name, c, err)
			}
		}
	}
	mustEqual(t, "after refusals", dump(t, n.store, false), before)
}

// The reserved run is no run for operators.
func TestNodeRunIsNoRun(t *testing.T) {
	n := newNode(t, one(scripted), quick)
	n.send("a", "r", "1", "{}")
	n.settle()
	n.write(func(ctx context.Context, tx *sqlite.Tx) error {
		_, err := nodeHead(ctx, tx, "d")
		return err
	})
	list, err := Runs(t.Context(), n.store, "", "", "", 10)
	if err != nil || len(list) != 1 {
		t.Errorf("runs: %+v, %v", list, err)
	}
	for _, prefix := range []string{"", "~", "~n"} {
		names, err := RunNames(t.Context(), n.store, "d", "", prefix, 10)
		if err != nil || slices.Contains(names, record.NodeRun) {
			t.Errorf("names with %q: %v, %v", prefix, names, err)
		}
	}
	var at TailCursor
	for name, do := range map[string]func() error{
		"show":  func() error { _, err := Show(t.Context(), n.store, "d", record.NodeRun); return err },
		"steps": func() error { _, err := Steps(t.Context(), n.store, "d", record.NodeRun, 0, 1); return err },
		"chain": func() error { _, err := Chain(t.Context(), n.store, "d", record.NodeRun, 1); return err },
		"tail":  func() error { _, err := Tail(t.Context(), n.store, "d", record.NodeRun, &at, 1, false); return err },
		"from":  func() error { _, err := TailFrom(t.Context(), n.store, "d", record.NodeRun, 1); return err },
		"rewind": func() error {
			_, err := Rewind(t.Context(), n.store, "d", record.NodeRun, 0, "")
			return err
		},
		"find": func() error { _, err := FindInput(t.Context(), n.store, "d", record.NodeRun, "1"); return err },
	} {
		if err := do(); !errors.Is(err, ErrNotFound) {
			t.Errorf("%s: %v, want ErrNotFound", name, err)
		}
	}
}

// Operators act from another process while the node works. Whatever they hit, each input is consumed once or dropped, and
// each run's steps follow from one another.
func TestOperatorsBesideARunningNode(t *testing.T) {
	var tries atomic.Int64
	o := quick
	o.MaxAttempts, o.Poll = 2, 5*time.Millisecond
	n := newNode(t, one(func(ctx context.Context, s agent.Step) (agent.Effects, error) {
		switch i := tries.Add(1); {
		case i%3 == 0:
			return agent.Effects{}, &agent.Error{Code: agent.Terminal, Message: "no"}
		case i%2 == 0:
			return agent.Effects{}, errors.New("not now")
		}
		return scripted(ctx, s)
	}), o)
	const runs, each = 5, 12
	for i := range runs * each {
		n.send("a", fmt.Sprint("r", i%runs), fmt.Sprint(i), "{}")
	}
	stop := n.start(t)
	other := n.second(t)
	r := rand.New(rand.NewPCG(1, 2))
	eventually(t, "all inputs are consumed or dropped", func() bool {
		list, _, err := Inputs(t.Context(), other, InputFilter{Tenant: "d", States: append([]string{InputDead}, InputStates[:LiveStates]...), Limit: 1000})
		if err != nil {
			t.Fatalf("%v", err)
		}
		for _, in := range list {
			var err error
			switch {
			case r.IntN(12) == 0:
				_, err = Drop(t.Context(), other, Selection{Tenant: "d", Rows: []int64{in.Row}}, "")
			case in.State == InputDead:
				_, err = Requeue(t.Context(), other, Selection{Tenant: "d", Rows: []int64{in.Row}}, "")
			case in.State == InputPaused:
				_, err = Resume(t.Context(), other, "d", in.Run, "")
			}
			if err != nil && !errors.Is(err, ErrConflict) { // the node was faster
				t.Fatalf("input %d: %v", in.Row, err)
			}
		}
		// A run whose input was dropped is ready until the node has seen that there is nothing for it.
		return len(list) == 0 && n.value("SELECT count(*) FROM run WHERE status <> 'idle'") == "0"
	})
	stop()
	consumed, dropped := n.value("SELECT count(*) FROM inbox WHERE consumed_branch IS NOT NULL AND ended_us IS NULL"), n.value("SELECT count(*) FROM inbox WHERE outcome = 'dropped' AND consumed_branch IS NULL")
	steps := n.value("SELECT count(*) FROM checkpoint c JOIN inbox i ON i.id = c.input AND i.consumed_branch = c.branch AND i.consumed_step = c.step")
	if all := n.value("SELECT count(*) FROM checkpoint WHERE step > 0"); steps != consumed || all != consumed ||
		n.value("SELECT ? + ?", consumed, dropped) != fmt.Sprint(runs*each) || dropped == "0" || consumed == "0" {
		t.Errorf("%s consumed and %s dropped of %d, in %s of %s steps", consumed, dropped, runs*each, steps, all)
	}
	for i := range runs {
		run := fmt.Sprint("r", i)
		if d := n.show(run); d.Status != "idle" || d.Step > 0 && string(d.State) != fmt.Sprint(d.Step) {
			t.Errorf("run %s is %s at step %d with state %s", run, d.Status, d.Step, d.State)
		}
	}
}
