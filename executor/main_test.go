package executor

import (
	"context"
	"database/sql"
	"errors"
	"flag"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"

	"postrider/internal/agent"
	"postrider/internal/record"
	"postrider/internal/sqlite"
)

func TestMain(m *testing.M) {
	if path := os.Getenv("POSTRIDER_TEST_KILL"); path != "" {
		if os.Getenv("POSTRIDER_TEST_KILL_WHAT") == "node" {
			killedNode(path)
		}
		killedStep(path) // does not return
	}
	if path := os.Getenv("POSTRIDER_TEST_NODE"); path != "" {
		childNode(path) // nor does this
	}
	// Each case commits some dozens of times; -rapid.checks on the command line asks for more of them.
	if err := flag.Set("rapid.checks", "10"); err != nil {
		panic(err)
	}
	goleak.VerifyTestMain(m)
}

type tester interface {
	Helper()
	Errorf(format string, args ...any)
	Fatalf(format string, args ...any)
}

// node is an executor on a real database. Its steps are taken by settle, one run after the other, in the test's own
// goroutine; tests of concurrency use start.
type node struct {
	*Executor
	t      tester
	path   string
	before func(query string) error // runs before each statement of a write
	clocks sqlite.Clocks
}

func newNode(t *testing.T, agents map[string]agent.Agent, o Options) *node {
	t.Helper()
	n := &node{t: t, path: filepath.Join(t.TempDir(), "node.db")}
	n.open(t, agents, o)
	t.Cleanup(func() {
		if err := n.store.Close(); err != nil {
			t.Error(err)
		}
	})
	return n
}

// open opens the node's database, as a new process does.
func (n *node) open(t *testing.T, agents map[string]agent.Agent, o Options) {
	t.Helper()
	n.Executor = New(openStore(t, n.path, func(q string) error {
		if n.before == nil {
			return nil
		}
		return n.before(q)
	}, n.clocks), "n1", agents, o)
	if err := n.recover(t.Context()); err != nil {
		t.Fatal(err)
	}
}

// restart is a crash of the process and its next life.
func (n *node) restart(t *testing.T, agents map[string]agent.Agent, o Options) {
	t.Helper()
	if err := n.store.Close(); err != nil {
		t.Fatal(err)
	}
	n.open(t, agents, o)
}

func openStore(t *testing.T, path string, before func(query string) error, clocks ...sqlite.Clocks) *sqlite.Store {
	t.Helper()
	o := sqlite.Options{Create: true, BeforeStatement: before}
	if len(clocks) > 0 {
		o.Clocks = clocks[0]
	}
	if time.Now().Year() == 2000 && o.Clocks.Uptime == nil { // in a bubble, whose time is not the machine's
		o.Clocks.Uptime = func() time.Duration { return time.Since(time.Unix(0, 0)) }
	}
	s, err := sqlite.Open(t.Context(), path, sqlite.NodeSchema(schemaText(), "n1", path), o)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// second opens the database once more, as another process does.
func (n *node) second(t *testing.T) *sqlite.Store {
	t.Helper()
	s := openStore(t, n.path, nil)
	t.Cleanup(func() {
		if err := s.Close(); err != nil {
			t.Error(err)
		}
	})
	return s
}

// schemaText is the root's schema.sql.
func schemaText() string {
	b, err := os.ReadFile(filepath.Join(moduleRoot(), "schema.sql"))
	if err != nil {
		panic(err)
	}
	return string(b)
}

// start runs the executor until stop, or until the test ends.
func (n *node) start(t *testing.T) (stop func()) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- n.Run(ctx) }()
	ended := false
	stop = func() {
		if ended {
			return
		}
		ended = true
		cancel()
		select {
		case err := <-done:
			if err != nil {
				t.Errorf("Run: %v", err)
			}
		case <-time.After(20 * time.Second):
			t.Fatal("Run does not end")
		}
	}
	t.Cleanup(stop)
	return stop
}

// settle takes steps, and passes inputs on, until no run has one that is due. Turns alone come as they come.
func (n *node) settle() {
	n.t.Helper()
	for range 10_000 {
		for more := true; more; {
			var err error
			if more, err = n.passOn(context.Background()); err != nil {
				n.t.Fatalf("pass on: %v", err)
			}
		}
		rows, err := n.store.Reader().Query(`SELECT id FROM run WHERE status IN ('ready', 'waiting') AND wake_us <= ?
			OR status = 'running' AND claim_alone IS NULL ORDER BY wake_us, id`, n.store.SteadyUS())
		if err != nil {
			n.t.Fatalf("%v", err)
		}
		var ids []int64
		for rows.Next() {
			var id int64
			if err := rows.Scan(&id); err != nil {
				n.t.Fatalf("%v", err)
			}
			ids = append(ids, id)
		}
		if rows.Close(); len(ids) == 0 {
			return
		}
		for _, id := range ids {
			n.work(context.Background(), id, &worker{pool: &pool{}})
		}
	}
	n.t.Fatalf("the runs do not come to rest")
}

func (n *node) write(unit sqlite.Unit) {
	n.t.Helper()
	if err := n.store.Write(context.Background(), unit); err != nil {
		n.t.Fatalf("write: %v", err)
	}
}

func (n *node) exec(query string, args ...any) {
	n.t.Helper()
	n.write(func(ctx context.Context, tx *sqlite.Tx) error {
		_, _, err := tx.Exec(ctx, query, args...)
		return err
	})
}

func (n *node) value(query string, args ...any) string {
	n.t.Helper()
	var s sql.NullString
	if err := n.store.Reader().QueryRow(query, args...).Scan(&s); err != nil && !errors.Is(err, sql.ErrNoRows) {
		n.t.Fatalf("%s: %v", query, err)
	}
	return s.String
}

// send submits an input of type t.
func (n *node) send(agentName, run, id, data string) Submitted {
	n.t.Helper()
	out, err := n.trySend(agentName, run, id, data)
	if err != nil {
		n.t.Fatalf("send: %v", err)
	}
	return out
}

func (n *node) trySend(agentName, run, id, data string) (Submitted, error) {
	return Submit(context.Background(), n.store, Input{Tenant: "d", Agent: agentName, Run: run, ID: id, Type: "t", Data: []byte(data), Source: "cli"})
}

func (n *node) show(run string) RunDetail {
	n.t.Helper()
	d, err := Show(context.Background(), n.store, "d", run)
	if err != nil {
		n.t.Fatalf("show %s: %v", run, err)
	}
	return d
}

func (n *node) rewind(run string, to int64) Rewound {
	n.t.Helper()
	out, err := Rewind(context.Background(), n.store, "d", run, to, "")
	if err != nil {
		n.t.Fatalf("rewind %s to %d: %v", run, to, err)
	}
	return out
}

func (n *node) mustBe(run, status, state string) {
	n.t.Helper()
	if d := n.show(run); d.Status != status || state != "" && string(d.State) != state {
		n.t.Errorf("run %s is %s with state %s (last error %q), want %s with %s", run, d.Status, d.State, d.LastError, status, state)
	}
}

// exported lists the records of a run's live lineage: LSN and type or topic.
func (n *node) exported(run string) (list []string) {
	n.t.Helper()
	branch, upTo := n.value("SELECT live FROM run WHERE name = ?", run), "9000000000000000000"
	for branch != "" {
		rows, err := n.store.Reader().Query(`SELECT o.lsn || ' ' || CASE o.kind WHEN 3 THEN o.topic WHEN 2 THEN o.to_agent || '@' || o.to_node ELSE o.type END
			FROM outbox o JOIN branch b ON b.id = o.branch WHERE o.branch = ? AND o.lsn <= CAST(? AS INTEGER) ORDER BY o.lsn DESC`, branch, upTo)
		if err != nil {
			n.t.Fatalf("%v", err)
		}
		for rows.Next() {
			var s string
			if err := rows.Scan(&s); err != nil {
				n.t.Fatalf("%v", err)
			}
			list = append(list, s)
		}
		rows.Close()
		upTo, branch = n.value("SELECT fork_lsn FROM branch WHERE id = ?", branch), n.value("SELECT parent FROM branch WHERE id = ?", branch)
	}
	slices.Reverse(list)
	return list
}

// stepInputs lists the inputs that the live lineage's steps consumed, from step 1.
func (n *node) stepInputs(run string) (list []string) {
	n.t.Helper()
	steps, err := Steps(context.Background(), n.store, "d", run, 0, 1000)
	if err != nil {
		n.t.Fatalf("steps: %v", err)
	}
	for _, s := range slices.Backward(steps) {
		if s.Step > 0 {
			list = append(list, s.Input)
		}
	}
	return list
}

// dump is the content of all tables but what every transaction changes. Plain leaves out times and names the branches by
// their row, so that dumps of two databases can be compared.
func dump(t tester, s *sqlite.Store, plain bool) map[string]string {
	t.Helper()
	db := s.Reader()
	list := func(query string) (out []string) {
		rows, err := db.Query(query)
		if err != nil {
			t.Fatalf("%s: %v", query, err)
		}
		defer rows.Close()
		for rows.Next() {
			var v string
			if err := rows.Scan(&v); err != nil {
				t.Fatalf("%v", err)
			}
			out = append(out, v)
		}
		return out
	}
	var ulids []string
	if plain {
		for i, u := range list("SELECT ulid FROM branch ORDER BY id") {
			ulids = append(ulids, u, fmt.Sprintf("<branch %d>", i+1))
		}
	}
	names := strings.NewReplacer(ulids...)
	all := map[string]string{}
	for _, table := range list("SELECT name FROM sqlite_master WHERE type = 'table' AND name NOT IN ('writer', 'meta') ORDER BY name") {
		var columns []string
		for _, c := range list("SELECT name FROM pragma_table_info('" + table + "') ORDER BY cid") {
			if !plain || !strings.HasSuffix(c, "_us") && c != "hash" && c != "epoch" {
				columns = append(columns, "quote(iif(typeof("+c+") = 'blob', CAST("+c+" AS TEXT), "+c+"))")
			}
		}
		rows := list("SELECT " + strings.Join(columns, " || ' ' || ") + " FROM " + table)
		slices.Sort(rows)
		all[table] = names.Replace(strings.Join(rows, "\n"))
	}
	all["rewinds"] = strings.Join(list("SELECT rewinds FROM meta"), "")
	return all
}

func mustEqual(t tester, what string, got, want map[string]string) {
	t.Helper()
	for _, table := range slices.Sorted(maps.Keys(want)) {
		has, wants := strings.Split(got[table], "\n"), strings.Split(want[table], "\n")
		for _, row := range has {
			if !slices.Contains(wants, row) {
				t.Errorf("%s: %s has the row\n\t%s", what, table, row)
			}
		}
		for _, row := range wants {
			if !slices.Contains(has, row) {
				t.Errorf("%s: %s lacks the row\n\t%s", what, table, row)
			}
		}
	}
}

// eventually asks until the answer is yes.
func eventually(t tester, what string, yes func() bool) {
	t.Helper()
	tick := time.NewTicker(2 * time.Millisecond)
	defer tick.Stop()
	for end := time.Now().Add(20 * time.Second); !yes(); <-tick.C {
		if time.Now().After(end) {
			t.Fatalf("not in time: %s", what)
		}
	}
}

func receive[T any](t tester, what string, c <-chan T) (v T) {
	t.Helper()
	select {
	case v = <-c:
	case <-time.After(20 * time.Second):
		t.Fatalf("not in time: %s", what)
	}
	return v
}

// scripted is an agent that does what its input's data says, in the JSON of effects, and keeps count in its state unless
// told another.
func scripted(_ context.Context, s agent.Step) (agent.Effects, error) {
	var e agent.Effects
	if s.Input != nil {
		var err error
		if e, err = agent.DecodeEffects(s.Input.Data); err != nil {
			return e, &agent.Error{Code: agent.Terminal, Message: err.Error()}
		}
	}
	if e.State == nil {
		var n int
		fmt.Sscan(string(s.State), &n)
		e.State = fmt.Append(nil, n+1)
	}
	return e, nil
}

func one(f agent.Func) map[string]agent.Agent { return map[string]agent.Agent{"a": f} }

var quick = Options{BackoffMin: 1, BackoffMax: 1, Topics: record.Topics{}}
