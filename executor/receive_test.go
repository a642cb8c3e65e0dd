package executor

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"pgregory.net/rapid"

	"postrider/internal/agent"
	"postrider/internal/record"
	"postrider/internal/sqlite"
)

// foreign is an input of somebody who is no node.
func foreign(agentName, run, id, data string) record.Inbound {
	return record.Inbound{Tenant: "d", Agent: agentName, Run: run, ID: id, Type: "t", Source: "mqtt:x", Data: []byte(data)}
}

func TestReceivedInputsCountOnce(t *testing.T) {
	n := newNode(t, one(scripted), quick)
	n.send("a", "over", "end", `{"next": "done"}`)
	n.send("a", "r", "mine", "{}")
	n.settle()
	long := strings.Repeat("x", 513)
	for _, c := range []struct {
		what string
		in   record.Inbound
		want record.Outcome
	}{
		{"fresh", foreign("a", "r", "f", `{}`), record.Stored},
		{"again", foreign("a", "r", "f", `{}`), record.Duplicate},
		{"other content", foreign("a", "r", "f", `{"next":"wait"}`), record.Conflict},
		{"and again", foreign("a", "r", "f", `{}`), record.Duplicate},
		{"sent here before", foreign("a", "r", "mine", `{}`), record.Duplicate},
		{"of the other run", foreign("a", "s", "mine", `{}`), record.Stored},
		{"a node's", fromNode("n2", 1, 7, "a", "r", "pr:n2/d/q/c", `{}`, 1), record.Stored},
		{"the same record", fromNode("n2", 1, 7, "a", "r", "pr:n2/d/q/c", `{}`, 1), record.Duplicate},
		{"the same id by another record", fromNode("n2", 1, 9, "a", "r", "pr:n2/d/q/c", `{}`, 1), record.Duplicate},
		{"a run that is done", fromNode("n2", 1, 10, "a", "over", "pr:1", `{}`, 1), record.Conflict},
		{"another agent's run", fromNode("n2", 1, 11, "b@", "r", "pr:1", `{}`, 1), record.DeadInput},
		{"a stranger", foreign("b", "r9", "f", `{}`), record.DeadInput},
		{"not JSON", foreign("a", "r", "g", `{`), record.DeadInput},
		{"no UTF-8", foreign("a", "r", "g", "\"\xff\""), record.DeadInput},
		{"a long id", foreign("a", "r", long, `{}`), record.DeadInput},
		{"an id of a command", foreign("a", "r", "pr:x", `{}`), record.DeadInput},
		{"a fault", record.Inbound{Fault: "no CloudEvent", Data: []byte{0xff, 0}}, record.DeadInput},
		{"no id", foreign("a", "r", "", `{}`), record.Stored},
		{"no id again", foreign("a", "r", "", `{}`), record.Stored},
		{"no run", foreign("a", "", "", `{}`), record.Stored},
		{"after all that", foreign("a", "r", "g", `{}`), record.Stored},
	} {
		if out := n.receive(c.in); out[0] != c.want {
			t.Errorf("%s: %s, want %s", c.what, out[0], c.want)
		}
	}
	n.settle()
	n.mustBe("r", "idle", "6")
	if got := n.value("SELECT count(*) FROM inbox WHERE outcome = 'dead' AND reason <> ''"); got != "9" {
		t.Errorf("%s dead letters, want 9: %s", got, n.inbox())
	}
}

// A record of another node may come again when its id is long forgotten.
func TestRecordsOfNodesAreKnownWithoutAWindow(t *testing.T) {
	n := newNode(t, one(scripted), quick)
	n.receive(fromNode("n2", 1, 7, "a", "r", "pr:x", `{}`, 1))
	n.exec("DELETE FROM seen")
	if out := n.receive(fromNode("n2", 1, 7, "a", "r", "pr:x", `{}`, 1)); out[0] != record.Duplicate {
		t.Errorf("it was %s", out[0])
	}
}

// An input that the database refuses all the same is a dead letter, and the others of its batch are taken.
func TestOneRefusedInputDoesNotHoldUpTheOthers(t *testing.T) {
	n := newNode(t, one(scripted), quick)
	n.exec("CREATE TRIGGER refuse BEFORE INSERT ON inbox WHEN NEW.type = 'bad' AND NEW.outcome IS NULL BEGIN SELECT RAISE(ABORT, 'no'); END")
	bad := foreign("a", "r", "2", "{}")
	bad.Type = "bad"
	if out := n.receive(foreign("a", "r", "1", "{}"), bad, foreign("a", "r", "3", "{}")); !slices.Equal(out, []record.Outcome{record.Stored, record.DeadInput, record.Stored}) {
		t.Errorf("they were %s", out)
	}
	n.settle()
	n.mustBe("r", "idle", "2")
	if got := n.inbox(); len(got) != 3 || !strings.Contains(strings.Join(got, " "), "2 dead nowhere: cannot be stored: ") {
		t.Errorf("inbox: %s", got)
	}
}

// Data comes to the agent as it came, or not at all.
func TestReceivedBytesAreKept(t *testing.T) {
	var got string
	n := newNode(t, one(func(_ context.Context, s agent.Step) (agent.Effects, error) {
		got = string(s.Input.Data)
		return agent.Effects{}, nil
	}), quick)
	for i, data := range []string{"9007199254740993", "[0.10, -0.0, 1E400]", `"\ud800"`, `{"a":1,"a":2}`, " {\t} \n", strings.Repeat("[", 9999) + strings.Repeat("]", 9999)} {
		got = "nothing"
		n.receive(foreign("a", "r", fmt.Sprint(i), data))
		n.settle()
		if got != data {
			t.Errorf("%.40q came as %.40q", data, got)
		}
	}
	for _, data := range []string{"", " ", "NaN", "{} {}", strings.Repeat("[", 100_000) + strings.Repeat("]", 100_000), `"` + strings.Repeat("x", maxInput) + `"`} {
		if out := n.receive(foreign("a", "r", "bad", data)); out[0] != record.DeadInput {
			t.Errorf("%.40q was %s", data, out[0])
		}
	}
}

// A batch is all or nothing, and a fault at any statement leaves nothing of it.
func TestFaultInReceiveLeavesNothing(t *testing.T) {
	fault := errors.New("fault")
	n := newNode(t, one(scripted), routed("b=n2"))
	in := []record.Inbound{foreign("a", "r", "f", `{}`), fromNode("n2", 1, 7, "b", "q", "pr:x", `{}`, 1), foreign("c", "r", "x", "{}"), {Fault: "odd"}}
	before := dump(t, n.store, false)
	for k := 1; ; k++ {
		i := 0
		n.before = func(string) error {
			if i++; i == k {
				return fault
			}
			return nil
		}
		_, err := Receive(t.Context(), n.store, in)
		n.before = nil
		if err == nil {
			if k < 20 {
				t.Fatalf("only %d statements", k-1)
			}
			break
		}
		if !errors.Is(err, fault) {
			t.Fatal(err)
		}
		mustEqual(t, fmt.Sprint("fault at ", k), dump(t, n.store, false), before)
	}
	n.want("outcomes of the next try", strings.Fields(fmt.Sprint(n.receive(in...))), []string{"[duplicate", "duplicate", "dead", "dead]"})
}

// What expires on its way is not given to anybody.
func TestReceivedInputsExpire(t *testing.T) {
	n := newNode(t, one(scripted), quick)
	late, soon := foreign("a", "r", "late", "{}"), foreign("a", "r", "soon", "{}")
	late.Expires, soon.Expires = time.Now().Add(-time.Minute).UnixMicro(), time.Now().Add(time.Hour).UnixMicro()
	n.receive(late, soon)
	n.settle()
	n.want("inbox", n.inbox(), []string{"late dead here: expired before its step", "soon consumed here"})
}

// Twenty at once on different ways with one id are one input.
func TestOneIDAtOnceIsOneInput(t *testing.T) {
	n := newNode(t, one(scripted), quick)
	other := n.second(t)
	var wg sync.WaitGroup
	var mu sync.Mutex
	stored := 0
	for i := range 20 {
		wg.Go(func() {
			var fresh bool
			switch i % 3 {
			case 0:
				out, err := Receive(t.Context(), n.store, []record.Inbound{foreign("a", "r", "x", "{}")})
				if err != nil {
					t.Error(err)
					return
				}
				fresh = out[0] == record.Stored
			default:
				store := n.store
				if i%3 == 1 {
					store = other
				}
				out, err := Submit(t.Context(), store, Input{Tenant: "d", Agent: "a", Run: "r", ID: "x", Type: "t", Data: []byte("{}"), Source: "cli"})
				if err != nil {
					t.Error(err)
					return
				}
				fresh = !out.Duplicate
			}
			if fresh {
				mu.Lock()
				stored++
				mu.Unlock()
			}
		})
	}
	wg.Wait()
	n.settle()
	n.mustBe("r", "idle", "1")
	if stored != 1 {
		t.Errorf("%d of 20 were told that theirs was stored", stored)
	}
}

func TestSeenIDsAreForgottenAfterTheWindow(t *testing.T) {
	n := newNode(t, one(scripted), quick)
	const many = 3*purgeBatch + 50
	for i := range many {
		n.send("a", fmt.Sprint("r", i%7), fmt.Sprint("id", i), "{}")
	}
	n.settle()
	if _, err := Submit(t.Context(), n.store, Input{Tenant: "d", Agent: "a", Run: "r0", ID: "waits", Type: "t", Data: []byte("{}"), Source: "cli", In: time.Hour}); err != nil {
		t.Fatal(err)
	}
	count := func() (k int) {
		if err := n.store.Reader().QueryRow("SELECT count(*) FROM seen").Scan(&k); err != nil {
			t.Fatal(err)
		}
		return k
	}
	purge := func() (rounds int) {
		for more := true; more; rounds++ {
			var err error
			before := count()
			if more, err = purgeSeen(t.Context(), n.store, time.Hour); err != nil {
				t.Fatal(err)
			}
			if gone := count() - before; gone < -purgeBatch || gone > 0 {
				t.Errorf("a round changed the ids by %d", gone)
			}
		}
		return rounds
	}
	purge()
	if got := count(); got != many+1 {
		t.Errorf("%d ids within the window, want %d", got, many+1)
	}
	n.exec("UPDATE seen SET at_us = at_us - 3601000000")
	if rounds := purge(); rounds < many/purgeBatch {
		t.Errorf("%d ids went in %d rounds", many, rounds)
	}
	if got := n.value("SELECT group_concat(input_id) FROM seen"); got != "waits" {
		t.Errorf("left are %s, want the one that waits", got)
	}
	if out := n.send("a", "r1", "id1", "{}"); out.Duplicate {
		t.Error("a forgotten id is still a duplicate")
	}
}

// The LSNs of a sender, noted in any order and repeatedly, are each fresh once, and neighbours share a row.
func TestNotedLSNsAreRanges(t *testing.T) {
	n := newNode(t, one(scripted), quick)
	branch := 0
	rapid.Check(t, func(t *rapid.T) {
		branch++
		key := record.BranchKey{Tenant: "d", Run: "r", Branch: fmt.Sprintf("%026d", branch)}
		known := map[int64]bool{}
		for _, lsn := range rapid.SliceOfN(rapid.Int64Range(1, 30), 1, 60).Draw(t, "lsns") {
			err := n.store.Write(context.Background(), func(ctx context.Context, tx *sqlite.Tx) error {
				fresh, err := noteLSN(ctx, tx, "n2", key, lsn)
				if fresh == known[lsn] {
					t.Fatalf("LSN %d is fresh: %v", lsn, fresh)
				}
				return err
			})
			if err != nil {
				t.Fatal(err)
			}
			known[lsn] = true
		}
		ranges := 0
		for lsn := range known {
			if !known[lsn-1] {
				ranges++
			}
		}
		var rows, covered int
		err := n.store.Reader().QueryRow("SELECT count(*), sum(hi - lo + 1) FROM seen_lsn WHERE branch = ?", key.Branch).Scan(&rows, &covered)
		if err != nil || rows != ranges || covered != len(known) {
			t.Fatalf("%d rows hold %d LSNs, want %d and %d (%v)", rows, covered, ranges, len(known), err)
		}
	})
}

// From an input to its records, to a command's input and the records of that, one correlation and one traceparent go
// through, and each names what it was made of.
func TestCausesAreCarriedOn(t *testing.T) {
	const trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
	n := newNode(t, one(scripted), quick)
	_, err := Submit(t.Context(), n.store, Input{Tenant: "d", Agent: "a", Run: "r", ID: "in", Type: "t", Source: "http", Trace: trace,
		Data: []byte(`{"events": [{"type": "e"}], "commands": [{"agent": "b@n2", "run": "far", "type": "t"}, {"run": "next", "type": "t", "id": "c", "data": {"next": "continue"}}]}`)})
	if err != nil {
		t.Fatal(err)
	}
	// The step after next: continue fails once, with a restart before.
	calls := 0
	n.restart(t, one(func(ctx context.Context, s agent.Step) (agent.Effects, error) {
		if s.Input != nil {
			return scripted(ctx, s)
		}
		if calls++; calls == 1 {
			return agent.Effects{}, errors.New("not yet")
		}
		return agent.Effects{Events: []agent.Event{{Type: "later"}}}, nil
	}), quick)
	n.settle()
	var got []string
	for _, it := range n.pending() {
		got = append(got, fmt.Sprintf("%s %d %s%s: %s, %s, %v", it.Key.Run, it.LSN, it.Type, it.ToAgent, it.Correlation, it.Causation, it.Trace == trace))
	}
	slices.Sort(got)
	n.want("records", got, []string{
		"next 1 postrider.run.started: in, pr:n1/d/r/c, true", "next 2 later: in, pr:n1/d/r/c, true",
		"r 1 postrider.run.started: in, in, true", "r 2 e: in, in, true", "r 3 tb: in, in, true"})
	if got := n.value("SELECT correlation || ' ' || causation || ' ' || trace FROM inbox WHERE run_name = 'next'"); got != "in in "+trace {
		t.Errorf("the command's input has %s", got)
	}
}

// A conflict that comes again, as a retained message does, is the dead letter that it was.
func TestConflictThatComesAgainIsOneDeadLetter(t *testing.T) {
	n := newNode(t, one(scripted), quick)
	n.receive(foreign("a", "r", "x", "1"))
	for range 3 {
		for _, data := range []string{"2", "3"} {
			if out := n.receive(foreign("a", "r", "x", data)); out[0] != record.Conflict {
				t.Errorf("%s was %s", data, out[0])
			}
		}
	}
	if got := n.value("SELECT count(*) FROM inbox WHERE outcome = 'dead'"); got != "2" {
		t.Errorf("%s dead letters of two contents", got)
	}
	if out := n.receive(foreign("a", "r", "x", "1")); out[0] != record.Duplicate {
		t.Errorf("the first was %s", out[0])
	}
}

// Ids are forgotten also while inputs cannot be passed on.
func TestIDsAreForgottenBesideFailures(t *testing.T) {
	n := newNode(t, one(scripted), quick)
	n.send("a", "r", "old", "{}")
	n.settle()
	n.exec("UPDATE seen SET at_us = 1")
	n.send("b@n2", "r2", "k", "{}")
	fault := errors.New("fault")
	n.before = func(q string) error {
		if strings.HasPrefix(q, "INSERT INTO outbox") {
			return fault
		}
		return nil
	}
	purged := time.Now().Add(-time.Hour)
	if _, err := n.errands(t.Context(), &purged); !errors.Is(err, fault) {
		t.Errorf("errands: %v", err)
	}
	if got := n.value("SELECT group_concat(input_id) FROM seen"); got != "k" {
		t.Errorf("ids %s are known", got)
	}
}

// An id from before schema 2, whose input nobody noted, is freed by a rewind, and kept while its input waits.
func TestIDsOfTheFormerSchema(t *testing.T) {
	const step = `{"commands": [{"type": "t", "in": "1h", "id": "k", "data": {}}]}`
	n := newNode(t, one(scripted), quick)
	n.send("a", "r", "1", step)
	n.settle()
	n.exec("UPDATE seen SET input = NULL, at_us = 1")
	if _, err := purgeSeen(t.Context(), n.store, time.Hour); err != nil {
		t.Fatal(err)
	}
	if got := n.value("SELECT group_concat(input_id) FROM seen"); got != "pr:n1/d/r/k" {
		t.Errorf("ids %s are known, want the timer's", got)
	}
	n.rewind("r", 0)
	n.send("a", "r", "2", step)
	n.settle()
	if got := n.value("SELECT count(*) FROM inbox WHERE command_id = 'k'"); got != "1" {
		t.Errorf("%s timers", got)
	}
}
