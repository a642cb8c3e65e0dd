package cli

import (
	"bytes"
	"context"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"postrider/executor"
	"postrider/internal/sqlite"
)

// However often it looks, a tail tells each thing once: the clock is the test's, and a minute has 300 looks.
func TestTailTellsEachThingOnce(t *testing.T) {
	schema, err := os.ReadFile("../../schema.sql")
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(t.TempDir(), "node.db")
	synctest.Test(t, func(t *testing.T) {
		store, err := sqlite.Open(t.Context(), path, sqlite.NodeSchema(string(schema), "n1", path), sqlite.Options{Create: true,
			Clocks: sqlite.Clocks{Uptime: func() time.Duration { return time.Since(time.Unix(0, 0)) }}})
		if err != nil {
			t.Fatal(err)
		}
		defer store.Close()
		exec := func(query string) {
			t.Helper()
			err := store.Write(t.Context(), func(ctx context.Context, tx *sqlite.Tx) error { _, _, err := tx.Exec(ctx, query); return err })
			if err != nil {
				t.Fatal(err)
			}
		}
		exec("INSERT INTO agent (name, kind, hosted, first_us, last_us) VALUES ('a', 'go', 1, 1, 1)")
		if _, err := executor.Submit(t.Context(), store, executor.Input{Tenant: "d", Agent: "a", Run: "r", Type: "t", Data: []byte("1"), Source: "cli"}); err != nil {
			t.Fatal(err)
		}
		exec("UPDATE run SET status = 'paused', last_error = 'why'")

		var out bytes.Buffer
		a := &App{Schema: string(schema), Stdout: &out, Stderr: &out, db: path, tenant: "d", output: "table"}
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		ended := make(chan error, 1)
		go func() { ended <- a.tail(ctx, Tail{Run: "r", Last: 10}) }()
		later := func(event, status int) {
			t.Helper()
			<-time.After(time.Minute)
			synctest.Wait()
			if e, s := strings.Count(out.String(), " rewind "), strings.Count(out.String(), " status "); e != event || s != status {
				t.Fatalf("%d rewinds, want %d; %d rests, want %d:\n%s", e, event, s, status, out.String())
			}
		}
		later(0, 1)
		if _, err := executor.Rewind(t.Context(), store, "d", "r", 0, ""); err != nil {
			t.Fatal(err)
		}
		later(1, 1) // ready is no rest
		exec("UPDATE run SET status = 'paused', last_error = 'why', wake_us = NULL")
		later(1, 2) // the same reason, and a pause of its own
		cancel()
		if err := <-ended; err != nil {
			t.Error(err)
		}
		if strings.Count(out.String(), "TIME") != 1 {
			t.Errorf("%q", out.String())
		}
	})
}
