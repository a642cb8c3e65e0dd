package executor

import (
	"errors"
	"fmt"
	"testing"
)

func TestRunsAreListedInPages(t *testing.T) {
	n := newNode(t, one(scripted), quick)
	for i := range 5 {
		for _, tenant := range []string{"t1", "t2"} {
			if _, err := Submit(t.Context(), n.store, Input{Tenant: tenant, Agent: "a", Run: fmt.Sprint("r", i), Type: "t", Data: []byte("{}")}); err != nil {
				t.Fatal(err)
			}
		}
	}
	for tenant, want := range map[string]string{
		"":   "t1/r0 t1/r1 t1/r2 t1/r3 t1/r4 t2/r0 t2/r1 t2/r2 t2/r3 t2/r4 ",
		"t2": "t2/r0 t2/r1 t2/r2 t2/r3 t2/r4 ",
		"t3": "",
	} {
		got, afterTenant, afterRun := "", "", ""
		for {
			page, err := Runs(t.Context(), n.store, tenant, afterTenant, afterRun, 3)
			if err != nil {
				t.Fatal(err)
			}
			for _, r := range page {
				got += r.Tenant + "/" + r.Run + " "
				afterTenant, afterRun = r.Tenant, r.Run
				if r.Agent != "a" || r.Status != "ready" || r.Pending != 1 || r.LSN != 1 || r.Step != 0 || r.Gen != 1 {
					t.Errorf("run %+v", r)
				}
			}
			if len(page) == 0 {
				break
			}
		}
		if got != want {
			t.Errorf("tenant %q: %s, want %s", tenant, got, want)
		}
	}
	if _, err := Show(t.Context(), n.store, "t3", "r0"); !errors.Is(err, ErrNotFound) {
		t.Errorf("show of no run: %v", err)
	}
}

// The steps of a lineage are listed across its branches, newest first, from any step.
func TestStepsAreListedInPagesAlongTheLineage(t *testing.T) {
	n := newNode(t, one(scripted), quick)
	n.steps("r", 1, 40)
	root := n.show("r").Branch
	child := n.rewind("r", 20).Branch
	n.settle()
	n.steps("r", 41, 55) // child: 21 to 35
	n.rewind("r", 33)
	n.settle()
	for _, size := range []int{1, 7, 100} {
		before, want := int64(0), int64(33)
		for {
			page, err := Steps(t.Context(), n.store, "d", "r", before, size)
			if err != nil {
				t.Fatal(err)
			}
			if len(page) == 0 {
				break
			}
			for _, s := range page {
				branch, input := root, fmt.Sprint("in", want)
				if want > 20 {
					branch, input = child, fmt.Sprint("in", want+20)
				}
				if want == 0 {
					input = ""
				}
				if s.Step != want || s.Branch != branch || s.Input != input || s.Next != "wait" || s.StartedUS > s.CommittedUS {
					t.Fatalf("pages of %d: %+v, want step %d of branch %s with input %q", size, s, want, branch, input)
				}
				want--
			}
			if before = page[len(page)-1].Step; before == 0 {
				break
			}
		}
		if want != -1 {
			t.Errorf("pages of %d end before step %d", size, want)
		}
	}
	if _, err := Steps(t.Context(), n.store, "d", "nobody", 0, 10); !errors.Is(err, ErrNotFound) {
		t.Errorf("steps of no run: %v", err)
	}
}
