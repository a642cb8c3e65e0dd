package main

import (
	"bytes"
	"context"
	"errors"
	"io"
	"log/slog"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"postrider/executor"
	"postrider/internal/agent"
	"postrider/internal/cli"
	"postrider/internal/devbroker"
	"postrider/internal/mqtt"
	"postrider/internal/mqtttest"
	"postrider/internal/record"
	"postrider/internal/sqlite"
)

// A relay that is started before its node leaves inputs at the broker, and says why: no agent is known yet, and each would
// be a dead letter.
func TestRelayBeforeItsNodeTakesNoInputs(t *testing.T) {
	path := filepath.Join(t.TempDir(), "node.db")
	store, err := sqlite.Open(t.Context(), path, sqlite.NodeSchema(schema, "n1", path), sqlite.Options{Create: true})
	if err != nil {
		t.Fatal(err)
	}
	broker, err := devbroker.Start("127.0.0.1:0", nil)
	if err != nil {
		t.Fatal(err)
	}
	defer broker.Close()
	var log lockedBuffer
	p := process{&cli.App{Schema: schema, Stdout: io.Discard, Stderr: io.Discard, Log: slog.New(slog.NewTextHandler(&log, nil))}}
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 2)
	topics := record.Topics{Root: record.DefaultRoot}
	inlets := record.Inlets{Topics: topics, Node: "n1"}
	if err := inlets.Check(); err != nil {
		t.Fatal(err)
	}
	go func() {
		ended <- p.relay(ctx, cli.Relay{DB: path, Broker: broker.URL(), Topics: topics, Inlets: inlets})
	}()
	said := func(what string) func() bool { return func() bool { return strings.Contains(log.String(), what) } }
	mqtttest.Eventually(t, "inputs are subscribed", said("inputs are subscribed"))

	c, err := mqtt.Dial(t.Context(), mqtt.Options{Broker: broker.URL(), ClientID: "sender"})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	d := c.Publish("postrider/v1/acme/nodes/n1/inbox", false,
		[]byte(`{"specversion":"1.0","id":"1","source":"/shop","type":"order","toagent":"a","torun":"r","data":1}`))
	<-d.Done()
	if err := d.Error(); err != nil {
		t.Fatal(err)
	}
	mqtttest.Eventually(t, "the reason is said", said("its node has not run yet"))
	count := func(query string) (n int) {
		t.Helper()
		if err := store.Get(t.Context(), query, nil, &n); err != nil {
			t.Fatal(err)
		}
		return n
	}
	if n := count("SELECT count(*) FROM inbox"); n != 0 {
		t.Errorf("%d inputs were taken in", n)
	}

	e := executor.New(store, "n1", map[string]agent.Agent{"a": agent.Func(func(context.Context, agent.Step) (agent.Effects, error) {
		return agent.Effects{}, nil
	})}, executor.Options{})
	go func() { ended <- e.Run(ctx) }()
	mqtttest.Eventually(t, "the input is a step", func() bool { return count("SELECT count(*) FROM inbox WHERE consumed_step = 1") == 1 })
	if n := count("SELECT count(*) FROM inbox"); n != 1 {
		t.Errorf("%d inputs, one was sent", n)
	}
	cancel()
	if err := errors.Join(<-ended, <-ended, store.Close()); err != nil {
		t.Error(err)
	}
}

// lockedBuffer is a log that a test reads while it is written.
type lockedBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (l *lockedBuffer) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

func (l *lockedBuffer) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}
