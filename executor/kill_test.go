package executor

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"postrider/internal/agent"
	"postrider/internal/record"
	"postrider/internal/sqlite"
)

const killInputs = 200

// adder adds 1 and emits 1.
func adder(_ context.Context, s agent.Step) (agent.Effects, error) {
	var n int
	fmt.Sscan(string(s.State), &n)
	return agent.Effects{State: fmt.Append(nil, n+1), Events: []agent.Event{{Type: "added"}}}, nil
}

// take gives a node its k-th input, on two ways in turn, and takes the step.
func (n *node) take(k int) {
	id := fmt.Sprint("in", k)
	if k%2 == 0 {
		n.send("a", "r", id, "{}")
	} else {
		n.receive(fromNode("n2", 1, int64(k), "a", "r", id, "{}", 1))
	}
	n.settle()
}

// killedNode is the child process of the test below: it gives the node all inputs again, as a sender does that does not
// know what became of them, and dies before the k-th statement after those that are steps already.
func killedNode(path string) {
	at, err := strconv.Atoi(os.Getenv("POSTRIDER_TEST_KILL_AT"))
	if err != nil {
		panic(err)
	}
	armed, i := false, 0
	store, err := sqlite.Open(context.Background(), path, sqlite.NodeSchema(schemaText(), "n1", path), sqlite.Options{Create: true, BeforeStatement: func(query string) error {
		if !armed {
			return nil
		}
		if i++; i == at {
			fmt.Fprint(os.Stderr, query)
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
	n := &node{Executor: New(store, "n1", one(adder), quick), t: failNow{}}
	done := 0
	if n.value("SELECT count(*) FROM run") != "0" {
		fmt.Sscan(string(n.show("r").State), &done)
	}
	armed = done == 0
	if err := n.recover(context.Background()); err != nil {
		panic(err)
	}
	for k := 1; k <= killInputs; k++ {
		armed = armed || k > done
		n.take(k)
	}
	if err := store.Close(); err != nil {
		panic(err)
	}
	os.Exit(0)
}

// Two hundred inputs that each add one and emit one, given again and again to a node that is killed before each statement
// of taking an input in and of a step: the counter is 200, there are 200 records, and nothing waits.
func TestKilledNodeCountsEachInputOnce(t *testing.T) {
	// What it is killed at, in the end: all that a node does from its start to its third step.
	want := map[string]bool{}
	whole := newNode(t, one(adder), quick)
	whole.before = func(query string) error { want[query] = true; return nil }
	for k := 1; k <= 3; k++ {
		whole.take(k)
	}
	path := filepath.Join(t.TempDir(), "node.db")
	kills := 0
	for at := 1; ; at = at%90 + 1 {
		var last strings.Builder
		child := exec.CommandContext(t.Context(), os.Args[0])
		child.Env = append(os.Environ(), "POSTRIDER_TEST_KILL="+path, "POSTRIDER_TEST_KILL_AT="+strconv.Itoa(at), "POSTRIDER_TEST_KILL_WHAT=node")
		child.Stderr = &last
		err := child.Run()
		if err == nil {
			break
		}
		var exit *exec.ExitError
		if !errors.As(err, &exit) || exit.Sys().(syscall.WaitStatus).Signal() != syscall.SIGKILL {
			t.Fatalf("child: %v\n%s", err, last.String())
		}
		kills++
		delete(want, last.String())
	}
	t.Logf("%d kills", kills)
	for query := range want {
		t.Errorf("it was never killed before: %s", query)
	}
	n := &node{t: t, path: path}
	n.open(t, one(adder), quick)
	defer n.store.Close()
	n.settle()
	n.mustBe("r", "idle", fmt.Sprint(killInputs))
	added := map[int64]bool{}
	for _, it := range n.pending() {
		if it.Type == "added" && it.Kind == record.Event {
			added[it.LSN] = true
		}
	}
	if waits := n.value("SELECT count(*) FROM inbox WHERE consumed_branch IS NULL"); len(added) != killInputs || waits != "0" {
		t.Errorf("%d records, and %s inputs wait", len(added), waits)
	}
}
