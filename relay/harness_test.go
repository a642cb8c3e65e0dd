package relay_test

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"sort"
	"sync"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"go.uber.org/goleak"

	"postrider/executor"
	"postrider/fold"
	"postrider/internal/agent"
	"postrider/internal/devbroker"
	"postrider/internal/mqtt"
	"postrider/internal/mqtttest"
	"postrider/internal/record"
	"postrider/internal/sqlite"
	"postrider/outbox"
	"postrider/relay"
)

const (
	nodeName = "n1"
	root     = "postrider"
	patience = 60 * time.Second // only a hang takes this long
)

// TestMain is also the relay process that tests kill.
func TestMain(m *testing.M) {
	if path := os.Getenv("POSTRIDER_TEST_RELAY_DB"); path != "" {
		if err := relayProcess(path, os.Getenv("POSTRIDER_TEST_RELAY_BROKER")); err != nil {
			fmt.Fprintln(os.Stderr, "relay process:", err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	goleak.VerifyTestMain(m)
}

func relayProcess(path, broker string) error {
	ctx := context.Background()
	store, err := sqlite.Open(ctx, path, sqlite.NodeSchema("", nodeName, path), sqlite.Options{})
	if err != nil {
		return err
	}
	return newRelay(store, broker, nil, impatient).Run(ctx)
}

// startRelayProcess runs a relay in a process of its own; kill ends it with SIGKILL and waits.
func startRelayProcess(t *testing.T, path, broker string) (kill func()) {
	t.Helper()
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), "POSTRIDER_TEST_RELAY_DB="+path, "POSTRIDER_TEST_RELAY_BROKER="+broker)
	cmd.Stderr = os.Stderr
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	var once sync.Once
	kill = func() {
		once.Do(func() {
			if err := cmd.Process.Kill(); err != nil {
				t.Error(err)
			}
			_ = cmd.Wait() // says that it was killed
		})
	}
	t.Cleanup(kill)
	return kill
}

func newRelay(store *sqlite.Store, broker string, spy func(relay.Conn) relay.Conn, o relay.Options) *relay.Relay {
	if o.BackoffMax == 0 {
		o.BackoffMax = 300 * time.Millisecond
	}
	return relay.New(outbox.New(store, nodeName), record.Topics{Root: root}, func(ctx context.Context) (relay.Conn, error) {
		c, err := mqtt.Dial(ctx, mqtt.Options{Broker: broker, ClientID: "relay-of-" + nodeName})
		if err != nil {
			return nil, err
		}
		if spy != nil {
			return spy(c), nil
		}
		return c, nil
	}, o)
}

// node is a node whose relay is started and stopped by the test.
type node struct {
	t     *testing.T
	ctx   context.Context
	store *sqlite.Store
	box   *outbox.Outbox
	reg   *prometheus.Registry

	mu     sync.Mutex
	notify func()
}

func newNode(t *testing.T) *node {
	t.Helper()
	text, err := os.ReadFile("../schema.sql")
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(t.TempDir(), "node.db")
	ctx := t.Context()
	store, err := sqlite.Open(ctx, path, sqlite.NodeSchema(string(text), nodeName, path), sqlite.Options{Create: true})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := store.Close(); err != nil {
			t.Error(err)
		}
	})
	n := &node{t: t, ctx: ctx, store: store, box: outbox.New(store, nodeName), reg: prometheus.NewRegistry()}
	n.reg.MustRegister(n.box)
	n.start(executor.New(store, nodeName, map[string]agent.Agent{"worker": agent.Func(work), "mixed": agent.Func(mix)}, executor.Options{Notify: n.ring}).Run)
	mqtttest.Eventually(t, "the agent is hosted", func() bool { return n.count("SELECT count(*) FROM agent") == 2 })
	return n
}

// ring is the executor's Notify: it reaches whichever relay runs.
func (n *node) ring() {
	n.mu.Lock()
	notify := n.notify
	n.mu.Unlock()
	if notify != nil {
		notify()
	}
}

// start runs an actor until stop is called or the test ends.
func (n *node) start(run func(context.Context) error) (stop func()) {
	n.t.Helper()
	ctx, cancel := context.WithCancel(context.WithoutCancel(n.ctx))
	done := make(chan error, 1)
	go func() { done <- run(ctx) }()
	var once sync.Once
	stop = func() {
		once.Do(func() {
			cancel()
			select {
			case err := <-done:
				if err != nil {
					n.t.Errorf("an actor ended with %v", err)
				}
			case <-time.After(patience):
				n.t.Error("an actor does not end")
			}
		})
	}
	n.t.Cleanup(stop)
	return stop
}

// startRelay ships n's records to a broker; spy may stand between relay and client.
func (n *node) startRelay(broker string, spy func(relay.Conn) relay.Conn, o relay.Options) (stop func()) {
	n.t.Helper()
	r := newRelay(n.store, broker, spy, o)
	n.mu.Lock()
	n.notify = r.Notify
	n.mu.Unlock()
	return n.start(r.Run)
}

// work is the agent: it counts its inputs, emits two events each, now and then orders a device or itself, takes steps
// without input, and ends when told.
func work(_ context.Context, s agent.Step) (agent.Effects, error) {
	var n int64
	if err := json.Unmarshal(s.State, &n); err != nil {
		return agent.Effects{}, err
	}
	n++
	e := agent.Effects{State: fmt.Appendf(nil, "%d", n)}
	for i := range 2 {
		e.Events = append(e.Events, agent.Event{Type: "did", Data: fmt.Appendf(nil, `{"n": %d, "i": %d, "big": 9007199254740993}`, n, i)})
	}
	if n%3 == 0 {
		e.Messages = append(e.Messages, agent.Message{Topic: "plant/" + s.Run + "/set", Payload: fmt.Appendf(nil, "%s %d", s.Branch, n)})
	}
	if n%5 == 0 {
		e.Next = agent.Continue
	}
	if s.Input != nil && s.Input.Type == "end" {
		e.Next = agent.Done
	}
	return e, nil
}

// mix is an agent that emits one record of each kind.
func mix(_ context.Context, s agent.Step) (agent.Effects, error) {
	if s.Input.Type == "expiring" {
		return agent.Effects{Messages: []agent.Message{
			{Topic: "plant/lamp/set", ExpiresIn: time.Nanosecond},
			{Topic: "plant/late", ExpiresIn: time.Hour},
		}}, nil
	}
	return agent.Effects{
		Events:   []agent.Event{{Type: "e", Data: []byte(`{"a": 0.10}`)}},
		Commands: []agent.Command{{Agent: "billing@hq", Run: "inv-7", Type: "charge", ID: "c-1"}},
		Messages: []agent.Message{{Topic: "plant/lamp/set", Payload: []byte{0, 255}, Retain: true}},
	}, nil
}

type runKey struct{ tenant, run string }

// someRuns names runs of several tenants; two tenants share run names.
func someRuns(tenants, runs int) []runKey {
	var keys []runKey
	for r := range runs {
		for t := range tenants {
			keys = append(keys, runKey{fmt.Sprintf("tenant%d", t), fmt.Sprintf("run%d", r)})
		}
	}
	return keys
}

// feed gives every run its inputs, all runs side by side.
func (n *node) feed(keys []runKey, inputs int, last string) {
	n.t.Helper()
	var wg sync.WaitGroup
	for _, k := range keys {
		wg.Go(func() {
			for i := range inputs {
				typ := "go"
				if i == inputs-1 {
					typ = last
				}
				_, err := executor.Submit(n.ctx, n.store, executor.Input{Tenant: k.tenant, Agent: "worker", Run: k.run, Type: typ, Data: []byte("null"), Source: "cli"})
				if err != nil {
					n.t.Errorf("submit to %v: %v", k, err)
					return
				}
			}
		})
	}
	wg.Wait()
}

// await waits until every run has this status and no input left.
func (n *node) await(keys []runKey, status string) {
	n.t.Helper()
	mqtttest.Eventually(n.t, "runs are "+status, func() bool {
		for _, k := range keys {
			d, err := executor.Show(n.ctx, n.store, k.tenant, k.run)
			if err != nil {
				n.t.Fatal(err)
			}
			if d.Status == "paused" || d.Attempts > 0 {
				n.t.Fatalf("run %v failed: %s", k, d.LastError)
			}
			if d.Status != status || d.Pending > 0 {
				return false
			}
		}
		return true
	})
}

// live lives every run's life: inputs, a rewind of some, a rewind of that, and the end. With no relay, all is a backlog.
func (n *node) live(keys []runKey) {
	n.t.Helper()
	n.feed(keys, 40, "go")
	n.await(keys, "idle")
	for i, k := range keys {
		if i%2 == 0 {
			n.rewind(k, 35)
		}
	}
	n.feed(keys, 20, "go")
	n.await(keys, "idle")
	for i, k := range keys {
		if i%4 == 0 {
			n.rewind(k, 40) // of the second branch
		}
		if i%6 == 0 {
			n.rewind(k, 33) // of the first branch again
		}
	}
	n.feed(keys, 10, "end")
	n.await(keys, "done")
}

func (n *node) rewind(k runKey, to int64) executor.Rewound {
	n.t.Helper()
	r, err := executor.Rewind(n.ctx, n.store, k.tenant, k.run, to, "test")
	if err != nil {
		n.t.Fatal(err)
	}
	return r
}

func (n *node) stats() outbox.Stats {
	n.t.Helper()
	s, err := n.box.Stats(n.ctx, "")
	if err != nil {
		n.t.Fatal(err)
	}
	return s
}

// awaitShipped waits until nothing is pending.
func (n *node) awaitShipped() {
	n.t.Helper()
	mqtttest.Eventually(n.t, "everything is shipped", func() bool { return n.stats().Pending == 0 })
}

// lineage is a run's live lineage of events as the node's own database has it, in the form in which a fold shows it.
func (n *node) lineage(k runKey) *fold.Shown {
	n.t.Helper()
	shown := &fold.Shown{Tenant: k.tenant, Node: nodeName, Run: k.run}
	rows, err := n.store.Reader().QueryContext(n.ctx, `WITH RECURSIVE line (branch, ulid, parent, forked, upto) AS (
		SELECT b.id, b.ulid, b.parent, b.fork_lsn, b.head_lsn FROM run r JOIN branch b ON b.id = r.live WHERE r.tenant = ? AND r.name = ?
		UNION ALL SELECT b.id, b.ulid, b.parent, b.fork_lsn, l.forked FROM line l JOIN branch b ON b.id = l.parent)
		SELECT l.ulid, o.lsn, o.type, o.data FROM line l JOIN outbox o ON o.branch = l.branch AND o.lsn <= l.upto AND o.kind = 1 ORDER BY o.lsn`, k.tenant, k.run)
	if err != nil {
		n.t.Fatal(err)
	}
	defer rows.Close()
	for rows.Next() {
		var r fold.ShownRecord
		if err := rows.Scan(&r.Branch, &r.LSN, &r.Type, &r.Data); err != nil {
			n.t.Fatal(err)
		}
		shown.Records = append(shown.Records, r)
		shown.Branch, shown.LSN = r.Branch, r.LSN // the live branch has at least its branch.opened
	}
	if err := rows.Err(); err != nil {
		n.t.Fatal(err)
	}
	if len(shown.Records) == 0 {
		n.t.Fatalf("run %v has no events", k)
	}
	return shown
}

// single folds what the node exports by delivering it once, in order, one at a time: what every other delivery must equal.
// It reads the backlog, so nothing may have been shipped yet.
func (n *node) single(keys []runKey) (folded map[runKey]string, events int) {
	n.t.Helper()
	f := newFold(n.t)
	var cursor outbox.Cursor
	topics := record.Topics{Root: root}
	for {
		items, err := n.box.Drain(n.ctx, "", &cursor, 100)
		if err != nil {
			n.t.Fatal(err)
		}
		if len(items) == 0 {
			break
		}
		for i := range items {
			if items[i].Kind != record.Event {
				continue
			}
			events++
			one := []fold.Arrived{fold.Arrive(topics, topics.Of(&items[i].Record), items[i].AppendCloudEvent(nil))}
			if r, err := f.Apply(n.ctx, one); err != nil || r.Stored != 1 {
				n.t.Fatalf("apply: %+v, %v", r, err)
			}
		}
	}
	return f.all(keys), events
}

// consumer is a fold that a test subscribes to a broker.
type consumer struct {
	t *testing.T
	*fold.Fold
}

func newFold(t *testing.T) *consumer {
	t.Helper()
	f, err := fold.Open(t.Context(), filepath.Join(t.TempDir(), "fold.db"), fold.Options{Name: "consumer", Store: sqlite.Options{Create: true}})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := f.Close(); err != nil {
			t.Error(err)
		}
	})
	return &consumer{t, f}
}

// all is every run as the fold shows it, in bytes.
func (c *consumer) all(keys []runKey) map[runKey]string {
	c.t.Helper()
	all := map[runKey]string{}
	for _, k := range keys {
		shown, err := c.Show(c.t.Context(), k.tenant, k.run, "")
		if err != nil {
			c.t.Fatalf("show %v: %v", k, err)
		}
		all[k] = string(shown.AppendJSON(nil))
	}
	return all
}

// check demands that the fold holds exactly want, each record once, no gap and no conflict.
func (c *consumer) check(keys []runKey, want map[runKey]string, events int) {
	c.t.Helper()
	var v *fold.Verification
	mqtttest.Eventually(c.t, "the fold has everything", func() bool {
		var err error
		if v, err = c.Verify(c.t.Context()); err != nil {
			c.t.Fatal(err)
		}
		return v.Records >= int64(events)
	})
	if v.Records != int64(events) || v.Gaps != 0 || v.Parked != 0 || v.Conflicts != 0 {
		c.t.Errorf("fold has %d records, %d gaps, %d parked, %d conflicts; %d records were exported", v.Records, v.Gaps, v.Parked, v.Conflicts, events)
	}
	got := c.all(keys)
	for _, k := range keys {
		if got[k] != want[k] {
			c.t.Errorf("run %v folded to\n%s\nsingle delivery gives\n%s", k, got[k], want[k])
		}
	}
}

// tap is a raw consumer that notes every delivery as it comes.
type tap struct {
	t      *testing.T
	mu     sync.Mutex
	events []record.Record
	others []string // payloads on other topics
}

func newTap(t *testing.T, broker string) *tap {
	t.Helper()
	tp := &tap{t: t}
	ctx, cancel := context.WithCancel(context.Background())
	first, done := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(done)
		for n := 0; ctx.Err() == nil; n++ {
			sub, err := mqtt.Subscribe(ctx, mqtt.Options{Broker: broker, ClientID: "tap"}, mqtt.Subscription{Filters: []string{root + "/v1/#", "plant/#"}})
			if err != nil {
				runtime.Gosched() // refused: the broker is down
				continue
			}
			if n == 0 {
				close(first)
			}
			tp.take(ctx, sub)
			sub.Close()
		}
	}()
	t.Cleanup(func() { cancel(); <-done })
	wait(t, first)
	return tp
}

// take notes what one connection brings.
func (tp *tap) take(ctx context.Context, sub *mqtt.Subscriber) {
	for {
		var m mqtt.Message
		select {
		case m = <-sub.C():
		case <-sub.Lost():
			return
		case <-ctx.Done():
			return
		}
		r, err := record.ParseCloudEvent(m.Payload)
		tp.mu.Lock()
		if err == nil {
			tp.events = append(tp.events, r)
		} else {
			tp.others = append(tp.others, m.Topic+" "+string(m.Payload))
		}
		tp.mu.Unlock()
		m.Ack()
	}
}

func (tp *tap) seen() []record.Record {
	tp.mu.Lock()
	defer tp.mu.Unlock()
	return append([]record.Record(nil), tp.events...)
}

type recordKey struct {
	key record.BranchKey
	lsn int64
}

// first keeps the first delivery of each record.
func first(events []record.Record) (firsts []record.Record) {
	seen := map[recordKey]bool{}
	for _, r := range events {
		if k := (recordKey{r.Key, r.LSN}); !seen[k] {
			seen[k] = true
			firsts = append(firsts, r)
		}
	}
	return firsts
}

// awaitEvents waits until that many different records have come.
func (tp *tap) awaitEvents(n int) []record.Record {
	tp.t.Helper()
	mqtttest.Eventually(tp.t, fmt.Sprintf("the consumer has %d records", n), func() bool { return len(first(tp.seen())) >= n })
	return tp.seen()
}

// checkOrder demands that first deliveries of each branch ascend by LSN, and those of a run's lineage in its order.
func checkOrder(t *testing.T, n *node, keys []runKey, events []record.Record) {
	t.Helper()
	place := map[recordKey]int{}
	last := map[record.BranchKey]int64{}
	stretches := map[record.BranchKey]int{}
	firsts := first(events)
	for i, r := range firsts {
		if r.LSN <= last[r.Key] {
			t.Errorf("branch %v: record %d came after record %d", r.Key, r.LSN, last[r.Key])
		}
		last[r.Key] = r.LSN
		place[recordKey{r.Key, r.LSN}] = i
		if i == 0 || firsts[i-1].Key != r.Key {
			stretches[r.Key]++
		}
	}
	interleaved := 0
	for _, n := range stretches {
		if n > 1 {
			interleaved++
		}
	}
	if interleaved < len(keys)/2 {
		t.Errorf("%d of %d branches came interleaved with others: the order proves little", interleaved, len(stretches))
	}
	for _, k := range keys {
		before := -1
		for _, r := range n.lineage(k).Records {
			at, ok := place[recordKey{record.BranchKey{Tenant: k.tenant, Run: k.run, Branch: r.Branch}, r.LSN}]
			if !ok {
				t.Errorf("run %v: record %d of branch %s never came", k, r.LSN, r.Branch)
			} else if at < before {
				t.Errorf("run %v: record %d of branch %s came before its lineage", k, r.LSN, r.Branch)
			}
			before = at
		}
	}
}

// spy stands between relay and client.
type spy struct {
	relay.Conn
	before func(topic string, payload []byte)
}

func (s *spy) Publish(topic string, retain bool, payload []byte) mqtt.Delivery {
	s.before(topic, payload)
	return s.Conn.Publish(topic, retain, payload)
}

func startBroker(t *testing.T) *devbroker.Broker {
	t.Helper()
	b, err := devbroker.Start("127.0.0.1:0", nil)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(b.Close)
	return b
}

func median[T int64 | time.Duration](list []T) T {
	sort.Slice(list, func(i, j int) bool { return list[i] < list[j] })
	return list[len(list)/2]
}
