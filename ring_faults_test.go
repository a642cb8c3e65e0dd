//go:build faults

package main

import (
	"encoding/json"
	"fmt"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"postrider/internal/mqtttest"
)

// ring is nodes around one real broker, each a process of its own.
type ring struct {
	t    *testing.T
	bin  string
	url  string
	dir  string
	proc map[string]*spawned
}

func newRing(t *testing.T) *ring {
	r := &ring{t: t, bin: binary(t), dir: t.TempDir(), proc: map[string]*spawned{}}
	_, r.url = mosquitto(t)
	return r
}

func (r *ring) db(node string) string { return filepath.Join(r.dir, node+".db") }

// start runs a node; a node that runs is killed first.
func (r *ring) start(node string, args ...string) {
	r.t.Helper()
	if p := r.proc[node]; p != nil {
		p.end(syscall.SIGKILL)
	}
	r.proc[node] = spawn(r.t, r.bin, append([]string{"serve", "--node", node, "--broker", r.url, "--db", r.db(node), "--listen", "off"}, args...)...)
	mqtttest.Eventually(r.t, node+" is there", func() bool { return r.try(node, "runs", "ls") == nil })
}

func (r *ring) try(node string, args ...string) error {
	_, err := r.run(node, args...)
	return err
}

func (r *ring) run(node string, args ...string) (string, error) {
	s := spawn(r.t, r.bin, append(args, "--db", r.db(node), "-o", "jsonl")...)
	<-s.done
	return s.stdout.String(), s.err
}

// total counts steps of all runs of a node.
func (r *ring) steps(node string) (n int64) {
	r.t.Helper()
	out, err := r.run(node, "runs", "ls")
	if err != nil {
		r.t.Fatal(err)
	}
	for line := range strings.Lines(out) {
		var run struct{ Step int64 }
		if err := json.Unmarshal([]byte(line), &run); err != nil {
			r.t.Fatal(err)
		}
		n += run.Step
	}
	return n
}

// Each input that two nodes hand to each other arrives once, though both are killed again and again.
func TestHandOverBetweenTwoNodes(t *testing.T) {
	r := newRing(t)
	one, two := []string{"--agent", "a=go:counter", "--route", "b=n2"}, []string{"--agent", "b=go:counter", "--route", "a=n1"}
	r.start("n1", one...)
	r.start("n2", two...)
	const each = 40
	for i := range each {
		for from, agent := range map[string]string{"n1": "b", "n2": "a"} {
			mqtttest.Eventually(t, "an input is taken", func() bool {
				return r.try(from, "send", agent, fmt.Sprint(agent, "-", i%3), "--id", strconv.Itoa(i)) == nil
			})
		}
		switch i % 10 {
		case 4:
			r.start("n1", one...)
		case 9:
			r.start("n2", two...)
		}
	}
	for _, node := range []string{"n1", "n2"} {
		mqtttest.Eventually(t, node+" has all inputs", func() bool { return r.steps(node) >= each })
		mqtttest.Eventually(t, node+" has shipped all", func() bool {
			out, err := r.run(node, "outbox", "stats")
			return err == nil && strings.Contains(out, `"pending":0,`)
		})
	}
	for _, node := range []string{"n1", "n2"} {
		if n := r.steps(node); n != each {
			t.Errorf("%s took %d steps for %d inputs", node, n, each)
		}
	}
}

// Three nodes that each have a route to the next, and no agent: an input goes round until its hops are used up, as one
// copy, and ends as one dead letter. Where one of them has the agent, it ends there.
func TestRingOfThree(t *testing.T) {
	r := newRing(t)
	next := map[string]string{"n1": "n2", "n2": "n3", "n3": "n1"}
	for node, to := range next {
		r.start(node, "--agent", "own"+node+"=go:counter", "--route", "lost="+to)
	}
	for i := range 5 {
		if err := r.try("n1", "send", "lost", "run-1", "--id", strconv.Itoa(i)); err != nil {
			t.Fatal(err)
		}
	}
	dead := func() (list []string) {
		for node := range next {
			out, err := r.run(node, "inbox", "dead")
			if err != nil {
				t.Fatal(err)
			}
			for line := range strings.Lines(out) {
				list = append(list, node+" "+line)
			}
		}
		return list
	}
	mqtttest.Eventually(t, "all inputs have gone round", func() bool { return len(dead()) >= 5 })
	for _, d := range dead() {
		// Eight hops from n1 end at n3.
		if !strings.HasPrefix(d, "n3 ") || !strings.Contains(d, "was handed over 8 times") {
			t.Errorf("dead letter %s", d)
		}
	}
	if n := len(dead()); n != 5 {
		t.Errorf("%d dead letters of 5 inputs", n)
	}

	r.start("n2", "--agent", "lost=go:counter", "--route", "lost=n3")
	for i := range 5 {
		if err := r.try("n3", "send", "lost", "run-2", "--id", strconv.Itoa(i)); err != nil {
			t.Fatal(err)
		}
	}
	mqtttest.Eventually(t, "n2 has them", func() bool { return r.steps("n2") >= 5 })
	if n := r.steps("n2"); n != 5 {
		t.Errorf("n2 took %d steps for 5 inputs", n)
	}
}
