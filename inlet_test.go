package main

import (
	"context"
	"errors"
	"path/filepath"
	"testing"
	"time"

	"postrider/executor"
	"postrider/internal/agent"
	"postrider/internal/httpapi"
	"postrider/internal/sqlite"
)

// An input over HTTP does not wait for the executor's next look at the database, and none is refused for good while the
// node does not know its own agents yet.
func TestInletWakesTheExecutor(t *testing.T) {
	path := filepath.Join(t.TempDir(), "node.db")
	store, err := sqlite.Open(t.Context(), path, sqlite.NodeSchema(schema, "n1", path), sqlite.Options{Create: true})
	if err != nil {
		t.Fatal(err)
	}
	stepped := make(chan struct{}, 1)
	e := executor.New(store, "n1", map[string]agent.Agent{"a": agent.Func(func(context.Context, agent.Step) (agent.Effects, error) {
		stepped <- struct{}{}
		return agent.Effects{}, nil
	})}, executor.Options{Poll: time.Hour})
	in := executor.Input{Tenant: "default", Agent: "a", Type: "message", Data: []byte("1"), Source: "http"}
	if _, err := (inlet{store, e}).Submit(t.Context(), in); !errors.Is(err, httpapi.ErrNotReady) {
		t.Errorf("before the start: %v", err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- e.Run(ctx) }()
	tick := time.NewTicker(time.Millisecond)
	defer tick.Stop()
	for deadline := time.After(20 * time.Second); e.Health() != nil; {
		select {
		case <-tick.C:
		case <-deadline:
			t.Fatal("the executor does not begin")
		}
	}
	if _, err := (inlet{store, e}).Submit(t.Context(), in); err != nil {
		t.Error(err)
	}
	select {
	case <-stepped:
	case <-time.After(20 * time.Second):
		t.Error("the step does not begin")
	}
	in.Agent = "nobody"
	if _, err := (inlet{store, e}).Submit(t.Context(), in); !errors.Is(err, executor.ErrNotFound) {
		t.Errorf("an unknown agent: %v", err)
	}
	cancel()
	if err := errors.Join(<-done, store.Close()); err != nil {
		t.Error(err)
	}
}
