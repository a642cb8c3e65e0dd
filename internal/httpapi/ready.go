package httpapi

import (
	"context"
	"encoding/json"
	"net/http"
	"sync"
	"time"
)

// Check is one thing that a process is for.
type Check struct {
	Name string
	// Ask says what is in the way of it, "" for nothing, and fails when it does not go on at all. One that does not return
	// when ctx ended (a disk hangs) counts as failing, and is not asked again before it has.
	Ask func(ctx context.Context) (trouble string, err error)
}

const (
	statusOK       = "ok"
	statusDegraded = "degraded" // what cannot be done now is done later, and nothing is lost
	statusFailing  = "failing"
)

// answer is the body of /readyz.
type answer struct {
	Status string   `json:"status"` // the worst of the checks
	Checks []result `json:"checks"`
}

type result struct {
	Name   string `json:"name"`
	Status string `json:"status"`
	Detail string `json:"detail,omitempty"`
}

// askFor bounds a check: probes give up after a second or a few.
const askFor = 2 * time.Second

// inquirer asks one check, once at a time for all who want to know.
type inquirer struct {
	Check
	asking *sync.WaitGroup // for those that have not returned

	mu  sync.Mutex
	now *inquiry // nil: none is under way
}

type inquiry struct {
	done   chan struct{}
	result result // after done
}

// ask joins the inquiry under way, or begins one, which goes on when whoever asked is gone.
func (q *inquirer) ask(ctx context.Context) *inquiry {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.now != nil {
		return q.now
	}
	now := &inquiry{done: make(chan struct{})}
	q.now = now
	q.asking.Go(func() {
		ctx, cancel := context.WithTimeout(ctx, askFor)
		defer cancel()
		now.result = q.result(ctx)
		q.mu.Lock()
		q.now = nil
		q.mu.Unlock()
		close(now.done)
	})
	return now
}

// ready answers 200 for ok and degraded, 503 for failing. ctx is the server's.
func ready(ctx context.Context, w http.ResponseWriter, checks []*inquirer) {
	limit := time.NewTimer(askFor + askFor/4) // for those that heed their context
	defer limit.Stop()
	a := answer{Status: statusOK, Checks: make([]result, len(checks))}
	asked := make([]*inquiry, len(checks))
	for i, q := range checks {
		asked[i] = q.ask(ctx)
	}
	late := false
	for i, q := range checks {
		if !late {
			select {
			case <-asked[i].done:
			case <-limit.C:
				late = true
			}
		}
		select {
		case <-asked[i].done:
			a.Checks[i] = asked[i].result
		default:
			a.Checks[i] = result{q.Name, statusFailing, "does not answer"}
		}
	}
	code := http.StatusOK
	for _, c := range a.Checks {
		switch {
		case c.Status == statusFailing:
			a.Status, code = statusFailing, http.StatusServiceUnavailable
		case c.Status == statusDegraded && a.Status == statusOK:
			a.Status = statusDegraded
		}
	}
	w.Header().Set("Content-Type", "application/json")
	w.Header().Set("X-Content-Type-Options", "nosniff")
	w.Header().Set("Cache-Control", "no-store")
	w.WriteHeader(code)
	enc := json.NewEncoder(w)
	enc.SetIndent("", "  ")
	_ = enc.Encode(a) // who asked may be gone
}

func (c *Check) result(ctx context.Context) result {
	trouble, err := c.Ask(ctx)
	switch {
	case err != nil:
		return result{c.Name, statusFailing, err.Error()}
	case trouble != "":
		return result{c.Name, statusDegraded, trouble}
	}
	return result{Name: c.Name, Status: statusOK}
}
