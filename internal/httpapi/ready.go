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
	// Ask says what is in the way of it, "" for nothing, and fails when it does not go on at all. It is asked from several
	// goroutines, and must return soon after ctx ended.
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

// ready answers 200 for ok and degraded, 503 for failing.
func ready(w http.ResponseWriter, r *http.Request, checks []Check) {
	ctx, cancel := context.WithTimeout(r.Context(), askFor)
	defer cancel()
	a := answer{Status: statusOK, Checks: make([]result, len(checks))}
	var wg sync.WaitGroup
	for i, c := range checks {
		wg.Go(func() { a.Checks[i] = c.result(ctx) })
	}
	wg.Wait()
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
