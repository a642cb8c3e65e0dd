package executor

import (
	"errors"
	"strings"
	"sync"
	"testing"

	"postrider/internal/agent"
	"postrider/internal/sqlite"
)

func TestInputIDCountsOnce(t *testing.T) {
	n := newNode(t, map[string]agent.Agent{"a": agent.Func(scripted), "b": agent.Func(scripted)}, quick)
	if first := n.send("a", "r", "x", `{"a": 1}`); first.Duplicate {
		t.Error("the first is called a duplicate")
	}
	before := dump(t, n.store, false)
	if again := n.send("a", "r", "x", `{"a": 1}`); !again.Duplicate || again.ID != "x" || again.Run != "r" || again.Tenant != "d" {
		t.Errorf("the same again: %+v", again)
	}
	for name, send := range map[string]func() error{
		"other data": func() error { _, err := n.trySend("a", "r", "x", `{"a":1}`); return err },
		"other type": func() error {
			_, err := Submit(t.Context(), n.store, Input{Tenant: "d", Agent: "a", Run: "r", ID: "x", Type: "u", Data: []byte(`{"a": 1}`), Source: "cli"})
			return err
		},
		"other agent":       func() error { _, err := n.trySend("b", "r", "x", `{"a": 1}`); return err },
		"run of another":    func() error { _, err := n.trySend("b", "r", "y", `{"a": 1}`); return err },
		"run of another, 2": func() error { _, err := n.trySend("b", "r", "", `{"a": 1}`); return err },
	} {
		if err := send(); !errors.Is(err, ErrConflict) {
			t.Errorf("%s: %v, want ErrConflict", name, err)
		}
	}
	mustEqual(t, "after duplicates and conflicts", dump(t, n.store, false), before)

	// The same id in another run is another input. Without an id, each is one.
	if out := n.send("a", "r2", "x", `{}`); out.Duplicate {
		t.Error("id x of another run is called a duplicate")
	}
	if one, two := n.send("a", "", "", "{}"), n.send("a", "", "", "{}"); one.ID == two.ID || one.Run == two.Run || one.Run == "" {
		t.Errorf("%+v and %+v", one, two)
	}
	n.settle()
	if out := n.send("a", "r", "x", `{"a": 1}`); !out.Duplicate {
		t.Error("a consumed input's id is taken again")
	}
}

func TestConcurrentSendsOfOneIDAreOneInput(t *testing.T) {
	n := newNode(t, one(scripted), quick)
	other := n.second(t)
	var wg sync.WaitGroup
	results := make(chan Submitted, 20)
	for i := range 20 {
		store := []*sqlite.Store{n.store, other}[i%2]
		wg.Go(func() {
			out, err := Submit(t.Context(), store, Input{Tenant: "d", Agent: "a", Run: "r", ID: "x", Type: "t", Data: []byte("{}")})
			if err != nil {
				t.Error(err)
			}
			results <- out
		})
	}
	wg.Wait()
	close(results)
	first := 0
	for out := range results {
		if !out.Duplicate {
			first++
		}
	}
	if got := n.value("SELECT count(*) FROM inbox"); first != 1 || got != "1" {
		t.Errorf("%d are called new and %s inputs stored, want 1", first, got)
	}
}

func TestDoneRunTakesNoInput(t *testing.T) {
	n := newNode(t, one(scripted), quick)
	n.send("a", "done", "x", `{"next": "done"}`)
	n.send("a", "failed", "x", `{"next": "fail"}`)
	n.settle()
	before := dump(t, n.store, false)
	for _, run := range []string{"done", "failed"} {
		if _, err := n.trySend("a", run, "y", `{}`); !errors.Is(err, ErrConflict) || !strings.Contains(err.Error(), run) {
			t.Errorf("run %s: %v, want ErrConflict", run, err)
		}
	}
	mustEqual(t, "after the conflict", dump(t, n.store, false), before)
	n.rewind("done", 0)
	if out, err := n.trySend("a", "done", "y", `{}`); err != nil || out.Duplicate {
		t.Errorf("after a rewind, an id that was refused before: %+v, %v", out, err)
	}
}

func TestSubmitRefusesAndNamesWhatIsWrong(t *testing.T) {
	n := newNode(t, one(scripted), quick)
	before := dump(t, n.store, false)
	good := Input{Tenant: "d", Agent: "a", Run: "r", ID: "x", Type: "t", Data: []byte("{}"), Source: "cli"}
	for _, c := range []struct {
		change func(in *Input)
		is     error
		want   string
	}{
		{func(in *Input) { in.Tenant = "" }, ErrInvalid, "invalid tenant: is empty"},
		{func(in *Input) { in.Tenant = "a/b" }, ErrInvalid, "invalid tenant: "},
		{func(in *Input) { in.Agent = strings.Repeat("a", 65) }, ErrInvalid, "invalid agent: "},
		{func(in *Input) { in.Agent = "nobody" }, ErrNotFound, "agent nobody was never hosted here"},
		{func(in *Input) { in.Run = "a b" }, ErrInvalid, "invalid run: "},
		{func(in *Input) { in.Run = "~node" }, ErrInvalid, "invalid run: "},
		{func(in *Input) { in.ID = "pr:x" }, ErrInvalid, "invalid id: \"pr:x\" starts with pr:"},
		{func(in *Input) { in.ID = "a\x00" }, ErrInvalid, "invalid id: "},
		{func(in *Input) { in.ID = strings.Repeat("x", 513) }, ErrInvalid, "invalid id: has 513 bytes"},
		{func(in *Input) { in.Type = "" }, ErrInvalid, "invalid type: has 0 bytes"},
		{func(in *Input) { in.Type = "a\nb" }, ErrInvalid, "invalid type: "},
		{func(in *Input) { in.Data = nil }, ErrInvalid, "invalid data: is not JSON"},
		{func(in *Input) { in.Data = []byte(`{"a": tru}`) }, ErrInvalid, "at byte 10"},
		{func(in *Input) { in.Data = []byte(`{} {}`) }, ErrInvalid, "at byte 4"},
		{func(in *Input) { in.Data = []byte("\"\xff\"") }, ErrInvalid, "invalid data: is not UTF-8"},
		{func(in *Input) { in.Data = []byte(`"` + strings.Repeat("x", 8<<20) + `"`) }, ErrInvalid, "invalid data: has 8388610 bytes"},
	} {
		in := good
		c.change(&in)
		_, err := Submit(t.Context(), n.store, in)
		if !errors.Is(err, c.is) || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%v, want %v with %q", err, c.is, c.want)
		}
	}
	mustEqual(t, "after refusals", dump(t, n.store, false), before)
}

func TestInputsComeInOrderOfDueTimeThenArrival(t *testing.T) {
	n := newNode(t, one(scripted), quick)
	for _, id := range []string{"1", "2", "3"} {
		n.send("a", "r", id, "{}")
	}
	if _, err := Submit(t.Context(), n.store, Input{Tenant: "d", Agent: "a", Run: "r", ID: "early", Type: "t", Data: []byte("{}"), AtUS: 1}); err != nil {
		t.Fatal(err)
	}
	n.settle()
	if got := strings.Join(n.stepInputs("r"), " "); got != "1 2 3 early" { // max(arrival, due)
		t.Errorf("inputs came as %s", got)
	}
}

// An id counts within a run, so it needs one: with a new run each time it would count every time.
func TestIDWithoutARunIsRefused(t *testing.T) {
	n := newNode(t, one(scripted), Options{})
	n.settle()
	_, err := Submit(t.Context(), n.store, Input{Tenant: "d", Agent: "a", ID: "order-17", Type: "t", Data: []byte("{}")})
	if !errors.Is(err, ErrInvalid) {
		t.Errorf("error: %v", err)
	}
	if got := n.value("SELECT count(*) FROM run"); got != "0" {
		t.Errorf("%s runs", got)
	}
}
