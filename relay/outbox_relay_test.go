package relay_test

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"runtime/debug"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus/testutil"

	"postrider/executor"
	"postrider/fold"
	"postrider/internal/mqtt"
	"postrider/internal/mqtttest"
	"postrider/internal/record"
	"postrider/internal/sqlite"
	"postrider/outbox"
	"postrider/relay"
)

// TestOutboxRelay is the acceptance test: what the executor committed reaches a consumer in order and counts exactly once,
// whatever broker, connection and relay do, and the executor notices none of it. Several tenants, runs and branches are
// interleaved throughout: within one branch any implementation is ordered.
func TestOutboxRelay(t *testing.T) {
	t.Run("RunsCompleteAlikeWithoutBroker", runsCompleteAlikeWithoutBroker)
	t.Run("ShipsInOrder", shipsInOrder)
	t.Run("FoldsToSingleDeliveryWhenAcksAreLost", foldsToSingleDeliveryWhenAcksAreLost)
	t.Run("SurvivesPanicMidBatch", survivesPanicMidBatch)
	t.Run("SurvivesSIGKILLMidBatch", survivesSIGKILLMidBatch)
	t.Run("SurvivesCutWithAcksOutstanding", survivesCutWithAcksOutstanding)
	t.Run("ExecutorNeverCallsBroker", executorNeverCallsBroker)
	t.Run("ShipsOnlyLiveLineageAfterRewind", shipsOnlyLiveLineageAfterRewind)
	t.Run("LagMetricsRiseAndFall", lagMetricsRiseAndFall)
}

// Assertions 1 and 2: with the broker down, or silent, every run completes, and steps and whole runs take as long as with
// the broker up. An executor that retried inline would complete too, slowly.
func runsCompleteAlikeWithoutBroker(t *testing.T) {
	up := startBroker(t)
	down := startBroker(t)
	down.Down()
	brokers := map[string]string{"up": up.Addr(), "down": down.Addr(), "silent": mqtttest.Silent(t)}
	steps, walls := map[string][]time.Duration{}, map[string][]time.Duration{}
	keys := someRuns(3, 3)
	for round := range 5 {
		for _, condition := range [][]string{{"up", "down", "silent"}, {"silent", "down", "up"}}[round%2] {
			t.Run(fmt.Sprintf("%s%d", condition, round), func(t *testing.T) {
				n := newNode(t)
				n.startRelay(brokers[condition], nil, relay.Options{})
				begin := time.Now()
				n.feed(keys, 12, "end")
				n.await(keys, "done")
				walls[condition] = append(walls[condition], time.Since(begin))
				for _, k := range keys {
					list, err := executor.Steps(n.ctx, n.store, k.tenant, k.run, 0, 1000)
					if err != nil {
						t.Fatal(err)
					}
					for _, s := range list[:len(list)-1] { // without step 0
						steps[condition] = append(steps[condition], time.Duration(s.CommittedUS-s.StartedUS)*time.Microsecond)
					}
				}
				if condition != "up" {
					if s := n.stats(); s.Shipped != 0 || s.Pending == 0 {
						t.Errorf("with the broker %s, %d records are shipped and %d pending", condition, s.Shipped, s.Pending)
					}
				}
			})
		}
	}
	if t.Failed() {
		return
	}
	baseStep, baseWall := median(steps["up"]), median(walls["up"])
	for _, condition := range []string{"down", "silent"} {
		step, wall := median(steps[condition]), median(walls[condition])
		t.Logf("broker %s: step %v (up: %v), run %v (up: %v)", condition, step, baseStep, wall, baseWall)
		if step > 2*baseStep {
			t.Errorf("with the broker %s a step takes %v, with it up %v", condition, step, baseStep)
		}
		if wall > 2*baseWall {
			t.Errorf("with the broker %s the runs take %v, with it up %v", condition, wall, baseWall)
		}
	}
}

// Assertions 3 and 4: once the broker is up everything ships, ascending by LSN in each branch, a parent's kept prefix
// before its child.
func shipsInOrder(t *testing.T) {
	n, broker, keys := newNode(t), startBroker(t), someRuns(3, 4)
	tp := newTap(t, broker.Addr())
	broker.Down()
	n.startRelay(broker.Addr(), nil, relay.Options{})
	n.live(keys)
	want, events := n.single(keys)
	if s := n.stats(); s.Shipped != 0 {
		t.Fatalf("%d records are shipped while the broker is down", s.Shipped)
	}
	if err := broker.Up(); err != nil {
		t.Fatal(err)
	}
	n.awaitShipped()
	seen := tp.awaitEvents(events)
	checkOrder(t, n, keys, seen)
	f := newFold(t)
	apply(t, f, seen, 50)
	f.check(keys, want, events)
}

// apply folds events as a consumer got them, in batches.
func apply(t *testing.T, f *consumer, events []record.Record, batch int) (sum fold.Result) {
	t.Helper()
	for len(events) > 0 {
		part := events[:min(batch, len(events))]
		events = events[len(part):]
		arrived := make([]fold.Arrived, len(part))
		for i, r := range part {
			arrived[i] = fold.Arrived{Record: r}
		}
		r, err := f.Apply(t.Context(), arrived)
		if err != nil {
			t.Fatal(err)
		}
		sum.Stored += r.Stored
		sum.Duplicates += r.Duplicates
		sum.Conflicts += r.Conflicts
	}
	return sum
}

// backlog is a node with a backlog of several tenants, runs and branches, a broker behind a proxy, a subscribed fold, and
// what the fold must come to.
type backlog struct {
	*node
	proxy  *mqtttest.Proxy
	tap    *tap
	fold   *consumer
	keys   []runKey
	want   map[runKey]string
	events int
}

func newBacklog(t *testing.T) *backlog {
	t.Helper()
	b := &backlog{node: newNode(t), fold: newFold(t), keys: someRuns(3, 4)}
	broker := startBroker(t)
	b.proxy = mqtttest.NewProxy(t, broker.Addr())
	b.tap = newTap(t, broker.Addr())
	sub, err := fold.NewSubscriber(b.fold.Fold, fold.SubscriberOptions{Broker: mqtt.Options{Broker: broker.Addr()}, Topics: record.Topics{Root: root}})
	if err != nil {
		t.Fatal(err)
	}
	b.start(sub.Run)
	b.live(b.keys)
	b.want, b.events = b.single(b.keys)
	return b
}

// check demands that everything is shipped, and that it folded to single delivery although records came more than once.
func (b *backlog) check() {
	b.t.Helper()
	b.awaitShipped()
	seen := b.tap.awaitEvents(b.events)
	checkOrder(b.t, b.node, b.keys, seen)
	b.fold.check(b.keys, b.want, b.events)
	if len(seen) == b.events {
		b.t.Error("no record came twice: the fault did not happen")
	}
}

// noneAcknowledged demands, while every PUBACK is dropped, that no record is acknowledged in the outbox. It waits until the
// relay gave a whole session up for want of PUBACKs, or did acknowledge: to look earlier would prove nothing.
func (b *backlog) noneAcknowledged() {
	b.t.Helper()
	mqtttest.Eventually(b.t, "a session is given up, or acknowledges", func() bool {
		return b.proxy.Counts().Connects > 1 || b.stats().Shipped > 0
	})
	if s := b.stats(); s.Shipped != 0 {
		b.t.Errorf("%d records are acknowledged in the outbox, and no PUBACK ever came", s.Shipped)
	}
}

// Assertion 5: PUBACKs are lost again and again, and the fold comes to what single delivery gives, to the byte.
func foldsToSingleDeliveryWhenAcksAreLost(t *testing.T) {
	b := newBacklog(t)
	// Every connection loses its PUBACKs from some point on; the relay gives each up and starts again.
	b.proxy.DropPubacks(-1)
	b.startRelay(b.proxy.Addr(), nil, impatient)
	b.proxy.Await("records without PUBACK", func(c mqtttest.Counts) bool { return c.DroppedPubacks > 0 })
	b.proxy.Await("a second session", func(c mqtttest.Counts) bool { return c.Connects > 1 })
	if s := b.stats(); s.Shipped != 0 {
		t.Errorf("%d records are acknowledged in the outbox, and no PUBACK ever came", s.Shipped)
	}
	for range 3 {
		b.proxy.DropPubacks(0)
		b.proxy.DropPubacks(20)
		before := b.proxy.Counts().Connects
		b.proxy.Await("a session ends for want of PUBACKs", func(c mqtttest.Counts) bool {
			return c.Connects > before || b.stats().Pending == 0
		})
	}
	b.proxy.DropPubacks(0)
	b.check()
}

// impatient gives a connection up soon after its PUBACKs stop; to be early only means another session.
var impatient = relay.Options{AckTimeout: 300 * time.Millisecond}

// Assertion 6, first way: a panic inside the session, with records in flight.
func survivesPanicMidBatch(t *testing.T) {
	b := newBacklog(t)
	var published, panics atomic.Int64
	b.proxy.DropPubacks(-1) // so that what was in flight is in doubt
	b.startRelay(b.proxy.Addr(), func(c relay.Conn) relay.Conn {
		if panics.Load() == 1 { // the session that panicked has acknowledged what it ever will
			if s := b.stats(); s.Shipped != 0 {
				t.Errorf("%d records are acknowledged in the outbox, and no PUBACK ever came", s.Shipped)
			}
			b.proxy.DropPubacks(0)
		}
		return &spy{c, func(string, []byte) {
			if n := published.Add(1); n%150 == 0 && n < 500 {
				panics.Add(1)
				panic("a bug in the session")
			}
		}}
	}, impatient)
	b.check()
	if panics.Load() == 0 {
		t.Error("no session panicked")
	}
}

// Assertion 6, second way: SIGKILL of the relay's process.
func survivesSIGKILLMidBatch(t *testing.T) {
	b := newBacklog(t)
	b.proxy.DropPubacks(-1)
	kill := startRelayProcess(t, b.store.Path(), b.proxy.Addr())
	b.proxy.Await("records in flight", func(c mqtttest.Counts) bool { return c.DroppedPubacks > 50 })
	b.noneAcknowledged()
	kill()
	b.proxy.DropPubacks(0)
	kill = startRelayProcess(t, b.store.Path(), b.proxy.Addr())
	mqtttest.Eventually(t, "something is shipped", func() bool { return b.stats().Shipped > 0 })
	kill() // perhaps between PUBACK and acknowledgement
	b.startRelay(b.proxy.Addr(), nil, impatient)
	b.check()
}

// Assertion 6, third way: the connection is cut with PUBACKs outstanding.
func survivesCutWithAcksOutstanding(t *testing.T) {
	b := newBacklog(t)
	b.proxy.DropPubacks(-1)
	b.startRelay(b.proxy.Addr(), nil, impatient)
	b.proxy.Await("records in flight", func(c mqtttest.Counts) bool { return c.DroppedPubacks > 50 })
	b.noneAcknowledged()
	b.proxy.DropPubacks(0)
	b.proxy.Cut()
	b.proxy.CutAfterPublishes(100)
	b.check()
	if c := b.proxy.Counts(); c.Connects < 3 {
		t.Errorf("%d connections; two cuts make three", c.Connects)
	}
}

// Assertion 7: no call of the client, and no dial, has a frame of the executor on its stack, the creators of its
// goroutine included. That executor and client cannot import each other is TestImportArrows' in package main; that Notify
// does no I/O is TestNotifyDoesNothingButRing's.
func executorNeverCallsBroker(t *testing.T) {
	n, broker, keys := newNode(t), startBroker(t), someRuns(3, 4)
	var calls atomic.Int64
	look := func() {
		calls.Add(1)
		if stack := string(debug.Stack()); strings.Contains(stack, "postrider/executor") {
			t.Errorf("the client is called from the execution path:\n%s", stack)
		}
	}
	n.startRelay(broker.Addr(), func(c relay.Conn) relay.Conn {
		look()
		return &watched{c, look}
	}, relay.Options{})
	n.live(keys)
	n.awaitShipped()
	if calls.Load() < n.stats().Shipped {
		t.Errorf("%d calls were seen for %d shipped records", calls.Load(), n.stats().Shipped)
	}
}

// watched looks at every call of a connection.
type watched struct {
	relay.Conn
	look func()
}

func (w *watched) Publish(topic string, retain bool, payload []byte) mqtt.Delivery {
	w.look()
	return w.Conn.Publish(topic, retain, payload)
}
func (w *watched) Lost() <-chan struct{} { w.look(); return w.Conn.Lost() }
func (w *watched) Err() error            { w.look(); return w.Conn.Err() }
func (w *watched) Close()                { w.look(); w.Conn.Close() }
func (w *watched) Kill()                 { w.look(); w.Conn.Kill() }

// Assertion 8: rewinds during a backlog, committed by another process while records are drained and not yet written. At
// most the one record that is being handed over passes each rewind.
func shipsOnlyLiveLineageAfterRewind(t *testing.T) {
	n, broker, keys := newNode(t), startBroker(t), someRuns(3, 4)
	tp := newTap(t, broker.Addr())
	n.feed(keys, 12, "go")
	n.await(keys, "idle")
	// The gate holds the relay inside the write of one record, with the rest of its batch drained.
	arrived, release := make(chan struct{}), make(chan struct{})
	var published atomic.Int64
	var mu sync.Mutex
	later := map[string]bool{} // topic and payload of what was handed over after the gate
	n.startRelay(broker.Addr(), func(c relay.Conn) relay.Conn {
		return &spy{c, func(topic string, payload []byte) {
			switch i := published.Add(1); {
			case i == 100:
				arrived <- struct{}{}
				<-release
			case i > 100:
				mu.Lock()
				later[topic+" "+string(payload)] = true
				mu.Unlock()
			}
		}}
	}, relay.Options{})
	wait(t, arrived)
	other, err := sqlite.Open(n.ctx, n.store.Path(), sqlite.NodeSchema("", nodeName, n.store.Path()), sqlite.Options{})
	if err != nil {
		t.Fatal(err)
	}
	withheld := int64(0)
	for i, k := range keys {
		r, err := executor.Rewind(n.ctx, other, k.tenant, k.run, int64(2+i%3), "test")
		if err != nil {
			t.Fatal(err)
		}
		withheld += r.Withheld
	}
	if err := other.Close(); err != nil {
		t.Fatal(err)
	}
	if withheld == 0 {
		t.Fatal("nothing is withheld: the rewinds came too late to prove anything")
	}
	close(release)
	n.feed(keys, 2, "end")
	n.await(keys, "done")
	n.awaitShipped()

	var want int
	live := map[recordKey]bool{}
	for _, k := range keys {
		for _, r := range n.lineage(k).Records {
			live[recordKey{record.BranchKey{Tenant: k.tenant, Run: k.run, Branch: r.Branch}, r.LSN}] = true
			want++
		}
	}
	mqtttest.Eventually(t, "the live lineage has come", func() bool {
		have := 0
		for _, r := range first(tp.seen()) {
			if live[recordKey{r.Key, r.LSN}] {
				have++
			}
		}
		return have == want
	})
	f := newFold(t)
	apply(t, f, tp.seen(), 7)
	v, err := f.Verify(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if v.Gaps != 0 || v.Parked != 0 || v.Conflicts != 0 || v.Records != int64(len(first(tp.seen()))) {
		t.Errorf("fold after rewinds: %d records, %d gaps, %d parked, %d conflicts", v.Records, v.Gaps, v.Parked, v.Conflicts)
	}
	for k, got := range f.all(keys) {
		if want := string(n.lineage(k).AppendJSON(nil)); got != want {
			t.Errorf("run %v folded to\n%s\nthe node has\n%s", k, got, want)
		}
	}
	// 99 records were handed over before the rewinds and the 100th was being handed over; after it, of all kinds, nothing
	// that a rewind had abandoned.
	abandoned := n.abandoned()
	mu.Lock()
	defer mu.Unlock()
	for _, what := range abandoned {
		if later[what] {
			t.Errorf("handed over after the rewinds: %s", what)
		}
	}
	if len(abandoned) < int(withheld) || len(later) == 0 {
		t.Errorf("%d abandoned records, %d withheld, %d handed over later: that proves nothing", len(abandoned), withheld, len(later))
	}
}

// abandoned is what the relay would publish, topic and payload, of all records that are off their run's live lineage.
func (n *node) abandoned() (list []string) {
	n.t.Helper()
	rows, err := n.store.Reader().QueryContext(n.ctx, `SELECT r.tenant, r.name, b.ulid, b.gen, b.epoch, o.lsn, o.step, o.kind, o.prevlsn, o.type,
		COALESCE(o.topic, ''), COALESCE(o.correlation, ''), COALESCE(o.causation, ''), o.occurred_us, o.recorded_us, o.data
		FROM outbox o JOIN branch b ON b.id = o.branch JOIN run r ON r.id = b.run WHERE o.lsn > b.exportable`)
	if err != nil {
		n.t.Fatal(err)
	}
	defer rows.Close()
	topics := record.Topics{Root: root}
	for rows.Next() {
		r := record.Record{Node: nodeName}
		if err := rows.Scan(&r.Key.Tenant, &r.Key.Run, &r.Key.Branch, &r.Gen, &r.Epoch, &r.LSN, &r.Step, &r.Kind, &r.PrevLSN, &r.Type,
			&r.Topic, &r.Correlation, &r.Causation, &r.Occurred, &r.Recorded, &r.Data); err != nil {
			n.t.Fatal(err)
		}
		payload := r.Data
		if r.Kind != record.Message {
			payload = r.AppendCloudEvent(nil)
		}
		list = append(list, topics.Of(&r)+" "+string(payload))
	}
	if err := rows.Err(); err != nil {
		n.t.Fatal(err)
	}
	return list
}

func (n *node) count(query string) (c int64) {
	n.t.Helper()
	if err := n.store.Reader().QueryRowContext(n.ctx, query).Scan(&c); err != nil && !errors.Is(err, sql.ErrNoRows) {
		n.t.Fatal(err)
	}
	return c
}

func wait(t *testing.T, c <-chan struct{}) {
	t.Helper()
	select {
	case <-c:
	case <-time.After(patience):
		t.Fatal("it does not come")
	}
}

// Assertion 9: the lag metrics rise while the broker is down, and return to zero.
func lagMetricsRiseAndFall(t *testing.T) {
	n, broker, keys := newNode(t), startBroker(t), someRuns(3, 3)
	broker.Down()
	n.startRelay(broker.Addr(), nil, relay.Options{})
	gather := func() map[string]float64 {
		families, err := n.reg.Gather()
		if err != nil {
			t.Fatal(err)
		}
		all := map[string]float64{}
		for _, f := range families {
			for _, m := range f.GetMetric() {
				name := f.GetName()
				for _, l := range m.GetLabel() {
					name += " " + l.GetValue()
				}
				all[name] = m.GetGauge().GetValue()
			}
		}
		return all
	}
	var last float64
	for range 3 {
		before := float64(time.Now().UnixMicro()) / 1e6
		n.feed(keys, 3, "go")
		n.await(keys, "idle")
		m := gather()
		var sum float64
		for _, tenant := range []string{"tenant0", "tenant1", "tenant2"} {
			pending, oldest := m["postrider_outbox_pending_records "+tenant], m["postrider_outbox_oldest_pending_timestamp_seconds "+tenant]
			sum += pending
			if pending == 0 || oldest == 0 || last == 0 && oldest < before || last > 0 && oldest > before {
				t.Errorf("%s has %v records pending, the oldest of %v; this round began at %v", tenant, pending, oldest, before)
			}
		}
		if sum <= last || sum != float64(n.stats().Pending) || m["postrider_outbox_pending_bytes"] <= 0 {
			t.Errorf("%v records pending after %v; the database has %+v", sum, last, n.stats())
		}
		last = sum
	}
	if err := broker.Up(); err != nil {
		t.Fatal(err)
	}
	mqtttest.Eventually(t, "the lag is gone", func() bool {
		for name, v := range gather() {
			if strings.Contains(name, "pending") && v != 0 {
				return false
			}
		}
		return true
	})
	if problems, err := testutil.GatherAndLint(n.reg); err != nil || len(problems) > 0 {
		t.Errorf("metric names: %v, %v", problems, err)
	}
}

// Notify only rings: with no session, no lock, a closed store and a dial that must not happen, it returns, allocates
// nothing, and does not block however often it is called.
func TestNotifyDoesNothingButRing(t *testing.T) {
	n := newNode(t)
	closed, err := sqlite.Open(n.ctx, n.store.Path(), sqlite.NodeSchema("", nodeName, n.store.Path()), sqlite.Options{})
	if err != nil {
		t.Fatal(err)
	}
	if err := closed.Close(); err != nil {
		t.Fatal(err)
	}
	r := relay.New(outbox.New(closed, nodeName), record.Topics{Root: root}, func(context.Context) (relay.Conn, error) {
		t.Error("Notify dials")
		return nil, errors.New("no")
	}, relay.Options{})
	if allocs := testing.AllocsPerRun(10_000, r.Notify); allocs != 0 {
		t.Errorf("Notify allocates %v times", allocs)
	}
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			for range 10_000 {
				r.Notify()
			}
		})
	}
	wg.Wait()
}
