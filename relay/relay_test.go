package relay_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"postrider/executor"
	"postrider/internal/mqtt"
	"postrider/internal/mqtttest"
	"postrider/internal/record"
	"postrider/internal/sqlite"
	"postrider/outbox"
	"postrider/relay"
)

// fakeConn is a connection whose PUBACKs the test gives.
type fakeConn struct {
	answer func(n int, topic string, payload []byte) error // of the nth record; errWithheld: none yet
	mu     sync.Mutex
	sent   []*fakeDelivery
	lost   chan struct{}
	once   sync.Once
}

var errWithheld = errors.New("withheld")

type fakeDelivery struct {
	topic   string
	payload string
	retain  bool
	done    chan struct{}
	err     error
}

func (d *fakeDelivery) Done() <-chan struct{} { return d.done }
func (d *fakeDelivery) Error() error          { <-d.done; return d.err }

func newFakeConn(answer func(n int, topic string, payload []byte) error) *fakeConn {
	return &fakeConn{answer: answer, lost: make(chan struct{})}
}

func (c *fakeConn) Publish(topic string, retain bool, payload []byte) mqtt.Delivery {
	c.mu.Lock()
	defer c.mu.Unlock()
	d := &fakeDelivery{topic: topic, payload: string(payload), retain: retain, done: make(chan struct{})}
	c.sent = append(c.sent, d)
	if err := c.answer(len(c.sent), topic, payload); !errors.Is(err, errWithheld) {
		d.err = err
		close(d.done)
	}
	return d
}
func (c *fakeConn) Lost() <-chan struct{} { return c.lost }
func (c *fakeConn) Err() error            { return mqtt.ErrPeerClosed }
func (c *fakeConn) Close()                {}
func (c *fakeConn) Kill()                 { c.once.Do(func() { close(c.lost) }) }

func (c *fakeConn) published() int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return len(c.sent)
}

// release gives all withheld PUBACKs.
func (c *fakeConn) release() {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, d := range c.sent {
		select {
		case <-d.done:
		default:
			close(d.done)
		}
	}
}

func ack(int, string, []byte) error      { return nil }
func withhold(int, string, []byte) error { return errWithheld }

// lonely is a relay over connections that the test makes.
func lonely(n *node, dial func(context.Context) (relay.Conn, error), o relay.Options) *relay.Relay {
	if o.BackoffMax == 0 {
		o.BackoffMax = 50 * time.Millisecond
	}
	return relay.New(n.box, record.Topics{Root: root}, dial, o)
}

func always(c relay.Conn) func(context.Context) (relay.Conn, error) {
	return func(context.Context) (relay.Conn, error) { return c, nil }
}

func (n *node) lock() string { return n.store.Path() + ".relay" }

// filled is a node with a backlog of two runs.
func filled(t *testing.T) *node {
	t.Helper()
	n, keys := newNode(t), someRuns(2, 1)
	n.feed(keys, 10, "go")
	n.await(keys, "idle")
	return n
}

func TestSecondRelayIsRefusedNamesTheHolderAndTakesOver(t *testing.T) {
	n := filled(t)
	first := newFakeConn(withhold)
	stop := n.start(lonely(n, always(first), relay.Options{}).Run)
	mqtttest.Eventually(t, "the first one publishes", func() bool { return first.published() > 0 })
	var log bytes.Buffer
	second := newFakeConn(ack)
	var mu sync.Mutex
	logger := slog.New(slog.NewTextHandler(&lockedWriter{mu: &mu, w: &log}, nil))
	n.start(lonely(n, always(second), relay.Options{Logger: logger}).Run)
	mqtttest.Eventually(t, "the second one says who holds the lock", func() bool {
		mu.Lock()
		defer mu.Unlock()
		return strings.Contains(log.String(), fmt.Sprintf("locked by %d@", os.Getpid()))
	})
	if n := second.published(); n != 0 {
		t.Errorf("the second one published %d records", n)
	}
	stop()
	n.awaitShipped()
	if second.published() == 0 {
		t.Error("the second one never took over")
	}
}

type lockedWriter struct {
	mu *sync.Mutex
	w  *bytes.Buffer
}

func (l *lockedWriter) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.w.Write(p)
}

// With the lock taken away under it, a relay whose PUBACKs come late finds a newer lease and changes nothing.
func TestStaleRelayChangesNothing(t *testing.T) {
	n := filled(t)
	stale := newFakeConn(withhold)
	reg := prometheus.NewRegistry()
	// After its session ended it would lease anew and fence the other; the long pause keeps it from that.
	stop := n.start(lonely(n, always(stale), relay.Options{Metrics: reg, BackoffMin: time.Hour, BackoffMax: time.Hour, AckTimeout: time.Hour}).Run)
	mqtttest.Eventually(t, "it has records in flight", func() bool { return stale.published() > 5 })
	if err := os.Remove(n.lock()); err != nil {
		t.Fatal(err)
	}
	fresh := newFakeConn(func(i int, _ string, _ []byte) error {
		if i > 10 {
			return errWithheld
		}
		return nil
	})
	n.start(lonely(n, always(fresh), relay.Options{AckTimeout: time.Hour}).Run)
	mqtttest.Eventually(t, "the fresh one ships", func() bool { return n.stats().Shipped == 10 })
	before := n.rows()
	stale.release()
	mqtttest.Eventually(t, "the stale one has noticed", func() bool { return value(t, reg, "postrider_relay_restarts_total", "fenced") == 1 })
	stop()
	if after := n.rows(); after != before {
		t.Errorf("the stale relay changed the store from\n%s\nto\n%s", before, after)
	}
	fresh.release()
	n.awaitShipped()
}

// rows is everything that a relay writes.
func (n *node) rows() string {
	n.t.Helper()
	var b strings.Builder
	for _, query := range []string{
		"SELECT id, shipped, deliveries, COALESCE(last_error, '') FROM branch ORDER BY id",
		"SELECT seq, branch, upto, '' FROM ship_log ORDER BY seq",
		"SELECT fence, COALESCE(next_us, 0), 0, COALESCE(last_error, '') FROM relay_lease",
		"SELECT branch, lsn, attempts, reason FROM dead ORDER BY branch, lsn",
	} {
		rows, err := n.store.Reader().QueryContext(n.ctx, query)
		if err != nil {
			n.t.Fatal(err)
		}
		for rows.Next() {
			var a, c, d int64
			var s string
			if err := rows.Scan(&a, &c, &d, &s); err != nil {
				n.t.Fatal(err)
			}
			fmt.Fprintln(&b, a, c, d, s)
		}
		if err := errors.Join(rows.Err(), rows.Close()); err != nil {
			n.t.Fatal(err)
		}
	}
	return b.String()
}

func value(t *testing.T, reg *prometheus.Registry, name, label string) float64 {
	t.Helper()
	families, err := reg.Gather()
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range families {
		for _, m := range f.GetMetric() {
			if f.GetName() == name && (label == "" || len(m.GetLabel()) > 0 && m.GetLabel()[0].GetValue() == label) {
				return m.GetCounter().GetValue() + m.GetGauge().GetValue()
			}
		}
	}
	t.Fatalf("no metric %s %s", name, label)
	return 0
}

func TestFailedDeliveryStaysPendingAndIsRecorded(t *testing.T) {
	n := filled(t)
	pending := n.stats().Pending
	var sessions atomic.Int64
	stop := n.start(lonely(n, func(context.Context) (relay.Conn, error) {
		sessions.Add(1)
		return newFakeConn(func(int, string, []byte) error { return fmt.Errorf("publish: %w", mqtt.ErrPeerClosed) }), nil
	}, relay.Options{}).Run)
	mqtttest.Eventually(t, "several sessions failed", func() bool { return n.count("SELECT max(deliveries) FROM branch") >= 3 })
	stop()
	if s := n.stats(); s.Pending != pending || s.Shipped != 0 {
		t.Errorf("%+v after %d failed sessions, %d were pending", s, sessions.Load(), pending)
	}
	if c := n.count("SELECT count(*) FROM branch WHERE attempts = 0 AND attempt_us > 0 AND last_error LIKE '%closed the connection%'"); c == 0 {
		t.Error("the failure is not recorded with its branch")
	}
	if c := n.count("SELECT count(*) FROM branch WHERE attempts <> 0 OR hold_us IS NOT NULL"); c != 0 {
		t.Error("an outage counts as an attempt")
	}
	if c := n.count("SELECT count(*) FROM relay_lease WHERE last_error LIKE '%closed the connection%' AND next_us > since_us"); c != 1 {
		t.Error("the failure and the next try are not recorded with the lease")
	}
	n.start(lonely(n, always(newFakeConn(ack)), relay.Options{}).Run)
	n.awaitShipped()
	if c := n.count("SELECT count(*) FROM branch WHERE deliveries > 0 OR last_error IS NOT NULL"); c != 0 {
		t.Error("what was recorded is not cleared by success")
	}
}

func TestFailedAcknowledgementRedelivers(t *testing.T) {
	n := filled(t)
	var broken atomic.Int64
	broken.Store(3)
	store, err := sqlite.Open(n.ctx, n.store.Path(), sqlite.NodeSchema("", nodeName, n.store.Path()), sqlite.Options{BeforeStatement: func(query string) error {
		if strings.HasPrefix(query, "UPDATE branch SET shipped") && broken.Add(-1) >= 0 {
			return errors.New("the disk is bad")
		}
		return nil
	}})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { store.Close() })
	conn, reg := newFakeConn(ack), prometheus.NewRegistry()
	n.start(relay.New(outbox.New(store, nodeName), record.Topics{Root: root}, always(conn), relay.Options{BackoffMax: 50 * time.Millisecond, Metrics: reg}).Run)
	n.awaitShipped()
	if broken.Load() >= 0 {
		t.Fatal("no acknowledgement failed")
	}
	if again := value(t, reg, "postrider_relay_redelivered_total", ""); again == 0 || conn.published() <= int(n.stats().Shipped) {
		t.Errorf("%d records published for %d shipped, %v counted as redelivered", conn.published(), n.stats().Shipped, again)
	}
}

// A batch that is read ahead and fails, just when a rewind has passed, is neither sent nor acknowledged: the records that
// the failed read had gone over come again.
func TestFailedReadAheadLosesNothing(t *testing.T) {
	n, keys := newNode(t), someRuns(1, 20)
	n.feed(keys, 40, "go")
	n.await(keys, "idle")
	exec := func(query string, args ...any) {
		t.Helper()
		if err := n.store.Write(n.ctx, func(ctx context.Context, tx *sqlite.Tx) error {
			_, _, err := tx.Exec(ctx, query, args...)
			return err
		}); err != nil {
			t.Fatal(err)
		}
	}
	// The chain of a branch in the middle of the second batch is broken.
	id := n.count("SELECT o.id FROM outbox o WHERE o.lsn = 40 AND o.branch = (SELECT id FROM branch ORDER BY backlog_id LIMIT 1 OFFSET 11)")
	prev := n.count(fmt.Sprintf("SELECT prev_id FROM outbox WHERE id = %d", id))
	exec("UPDATE outbox SET prev_id = NULL WHERE id = ?", id)
	arrived, release := make(chan struct{}), make(chan struct{})
	conn := newFakeConn(func(i int, _ string, _ []byte) error {
		if i == 500 {
			arrived <- struct{}{}
			<-release
		}
		return nil
	})
	reg := prometheus.NewRegistry()
	n.start(lonely(n, always(conn), relay.Options{AckTimeout: time.Hour, Metrics: reg}).Run)
	wait(t, arrived)
	// Only the two watches hold a reading connection once the batch ahead was read. To look too early would only weaken
	// the test.
	quiet := 0
	mqtttest.Eventually(t, "the batch ahead was read", func() bool {
		if quiet++; n.store.Reader().Stats().InUse > 2 {
			quiet = 0
		}
		return quiet > 50
	})
	exec("UPDATE outbox SET prev_id = ? WHERE id = ?", prev, id)
	exec("UPDATE meta SET rewinds = rewinds + 1")
	close(release)
	n.awaitShipped()
	if value(t, reg, "postrider_relay_restarts_total", "other") == 0 {
		t.Error("no read failed: that proves nothing")
	}
	distinct := map[string]bool{}
	conn.mu.Lock()
	defer conn.mu.Unlock()
	for _, d := range conn.sent {
		distinct[d.topic+" "+d.payload] = true
	}
	if all := n.count("SELECT count(*) FROM outbox"); int64(len(distinct)) != all {
		t.Errorf("%d records are marked as shipped, %d different records were sent", all, len(distinct))
	}
}

// panicky is a connection with a bug.
type panicky struct{ *fakeConn }

func (panicky) Err() error { panic("a bug in Err") }

func TestPanicAboutALostConnectionEndsTheSessionOnly(t *testing.T) {
	n, reg := filled(t), prometheus.NewRegistry()
	bad, good := newFakeConn(withhold), newFakeConn(ack)
	var dials atomic.Int64
	n.start(lonely(n, func(context.Context) (relay.Conn, error) {
		if dials.Add(1) == 1 {
			return panicky{bad}, nil
		}
		return good, nil
	}, relay.Options{AckTimeout: time.Hour, Metrics: reg, Grace: time.Millisecond}).Run)
	mqtttest.Eventually(t, "records are in flight", func() bool { return bad.published() > 0 })
	bad.Kill()
	n.awaitShipped()
	if value(t, reg, "postrider_relay_restarts_total", "panic") != 1 {
		t.Error("the panic is not counted")
	}
}

// The relay's place ends with its context and for nothing else.
func TestRunReturnsOnlyWhenInterrupted(t *testing.T) {
	n := filled(t)
	for name, dial := range map[string]func(context.Context) (relay.Conn, error){
		"no broker":    func(context.Context) (relay.Conn, error) { return nil, mqtt.ErrUnreachable },
		"refused":      func(context.Context) (relay.Conn, error) { return nil, &mqtt.RefusedError{Code: 5} },
		"panic":        func(context.Context) (relay.Conn, error) { panic("a bug in dial") },
		"late panic":   always(newFakeConn(func(int, string, []byte) error { panic("a bug in publish") })),
		"hanging dial": func(ctx context.Context) (relay.Conn, error) { <-ctx.Done(); return nil, ctx.Err() },
	} {
		t.Run(name, func(t *testing.T) {
			var dials atomic.Int64
			r := lonely(n, func(ctx context.Context) (relay.Conn, error) {
				dials.Add(1)
				return dial(ctx)
			}, relay.Options{BackoffMin: time.Millisecond, BackoffMax: 2 * time.Millisecond})
			ctx, cancel := context.WithCancel(n.ctx)
			done := make(chan error, 1)
			go func() { done <- r.Run(ctx) }()
			mqtttest.Eventually(t, "it has tried", func() bool {
				select {
				case err := <-done:
					t.Fatalf("Run returned %v", err)
				default:
				}
				return dials.Load() >= 5 || name == "hanging dial" && dials.Load() == 1
			})
			cancel()
			select {
			case err := <-done:
				if err != nil {
					t.Errorf("Run returned %v", err)
				}
			case <-time.After(patience):
				t.Fatal("Run does not end")
			}
		})
	}
	t.Run("no lock to be had", func(t *testing.T) {
		if err := errors.Join(os.Remove(n.lock()), os.Mkdir(n.lock(), 0o700)); err != nil {
			t.Fatal(err)
		}
		r := lonely(n, always(newFakeConn(ack)), relay.Options{BackoffMin: time.Millisecond, BackoffMax: 2 * time.Millisecond})
		ctx, cancel := context.WithTimeout(n.ctx, 50*time.Millisecond)
		defer cancel()
		if err := r.Run(ctx); err != nil || ctx.Err() == nil {
			t.Errorf("Run returned %v before its context ended", err)
		}
	})
	if s := n.stats(); s.Shipped != 0 {
		t.Errorf("%d records are shipped", s.Shipped)
	}
}

// At the end PUBACKs of what is in flight are waited for and settled.
func TestEndSettlesWhatIsInFlight(t *testing.T) {
	n := filled(t)
	conn := newFakeConn(withhold)
	ctx, cancel := context.WithCancel(n.ctx)
	done := make(chan error, 1)
	r := lonely(n, always(conn), relay.Options{Grace: patience, AckTimeout: time.Hour})
	go func() { done <- r.Run(ctx) }()
	total := int(n.stats().Pending)
	mqtttest.Eventually(t, "all is in flight", func() bool { return conn.published() == total })
	cancel()
	conn.release()
	if err := <-done; err != nil {
		t.Fatal(err)
	}
	if s := n.stats(); s.Pending != 0 {
		t.Errorf("%d records with a PUBACK are pending", s.Pending)
	}
}

// A broker that takes records and confirms none is trouble, also while a session is connected; the first PUBACK ends it.
func TestHealthOfASilentBroker(t *testing.T) {
	n := filled(t)
	var mended atomic.Bool
	r := lonely(n, func(context.Context) (relay.Conn, error) {
		if mended.Load() {
			return newFakeConn(ack), nil
		}
		return newFakeConn(withhold), nil
	}, relay.Options{AckTimeout: 50 * time.Millisecond, Grace: time.Millisecond})
	if _, err := r.Health(); err == nil {
		t.Error("it did not start yet")
	}
	n.start(r.Run)
	mqtttest.Eventually(t, "a session waits for a PUBACK after one that got none", func() bool {
		trouble, err := r.Health()
		return err == nil && strings.HasSuffix(trouble, "no PUBACK came yet")
	})
	mended.Store(true)
	n.awaitShipped()
	if trouble, err := r.Health(); trouble != "" || err != nil {
		t.Errorf("everything is shipped: %q, %v", trouble, err)
	}
}

// A session that has nothing to do, and one that waits long for a PUBACK, are no standstill; a publisher that hangs is one.
func TestHealthOfAQuietSession(t *testing.T) {
	for name, c := range map[string]struct {
		answer  func(int, string, []byte) error
		window  int
		hangs   bool // in Publish
		healthy bool
	}{
		"idle":                          {ack, 0, false, true},
		"waits for a PUBACK":            {withhold, 0, false, true},
		"waits for a place in a window": {withhold, 2, false, true},
		"hangs in Publish":              {ack, 0, true, false},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				n := filled(t)
				conn := hanging{newFakeConn(c.answer), make(chan struct{})}
				if !c.hangs {
					close(conn.until)
				}
				r := lonely(n, always(conn), relay.Options{Window: c.window, AckTimeout: time.Hour, Grace: time.Millisecond})
				stop := n.start(r.Run)
				<-time.After(3 * time.Minute) // of the bubble
				trouble, err := r.Health()
				if c.healthy && (trouble != "" || err != nil) {
					t.Errorf("%q, %v", trouble, err)
				}
				if !c.healthy && (err == nil || !strings.HasPrefix(err.Error(), "the relay did nothing for ")) {
					t.Errorf("%q, %v", trouble, err)
				}
				if c.hangs {
					close(conn.until)
				}
				stop()
			})
		})
	}
}

// After a connection that lasted, also one with nothing to do, the pauses start anew; after short ones they grow.
func TestAGoodSessionEndsTheBackoff(t *testing.T) {
	for lasts, want := range map[time.Duration]struct{ least, most int }{6 * time.Second: {85, 100}, time.Second: {5, 70}} {
		synctest.Test(t, func(t *testing.T) {
			n := newNode(t)
			dials := 0
			r := lonely(n, func(context.Context) (relay.Conn, error) {
				dials++
				conn := newFakeConn(ack)
				time.AfterFunc(lasts, conn.Kill)
				return conn, nil
			}, relay.Options{BackoffMax: 30 * time.Second})
			stop := n.start(r.Run)
			<-time.After(10 * time.Minute) // of the bubble
			stop()
			if dials < want.least || dials > want.most {
				t.Errorf("%d sessions of %s in ten minutes, want %d to %d", dials, lasts, want.least, want.most)
			}
		})
	}
}

type hanging struct {
	*fakeConn
	until chan struct{}
}

func (h hanging) Publish(topic string, retain bool, payload []byte) mqtt.Delivery {
	<-h.until
	return h.fakeConn.Publish(topic, retain, payload)
}

// A broker that says nothing more is given up, and the grace period bounds the end.
func TestSilenceEndsTheSession(t *testing.T) {
	n := filled(t)
	reg := prometheus.NewRegistry()
	stop := n.start(lonely(n, func(context.Context) (relay.Conn, error) { return newFakeConn(withhold), nil },
		relay.Options{AckTimeout: 20 * time.Millisecond, Grace: 10 * time.Millisecond, Metrics: reg}).Run)
	mqtttest.Eventually(t, "two sessions were given up", func() bool { return value(t, reg, "postrider_relay_restarts_total", "timeout") >= 2 })
	stop()
	if s := n.stats(); s.Shipped != 0 {
		t.Errorf("%d records are shipped", s.Shipped)
	}
}

// The reason is the silence, not that the relay hung up over it: its patience and its metric go by that.
func TestSilenceOfARealBrokerIsTheReason(t *testing.T) {
	n := filled(t)
	fake := mqtttest.NewFake(t)
	fake.OnPublish(func(mqtttest.FakePublish) mqtttest.Answer { return mqtttest.Ignore })
	reg := prometheus.NewRegistry()
	stop := n.start(newRelay(n.store, fake.URL(), nil, relay.Options{AckTimeout: 20 * time.Millisecond, Grace: 10 * time.Millisecond, Metrics: reg}).Run)
	mqtttest.Eventually(t, "two sessions were given up", func() bool { return value(t, reg, "postrider_relay_restarts_total", "timeout") >= 2 })
	stop()
	for _, reason := range []string{"closed", "other"} {
		if n := value(t, reg, "postrider_relay_restarts_total", reason); n != 0 {
			t.Errorf("%v sessions ended for the reason %s", n, reason)
		}
	}
}

func TestWindowBoundsWhatIsInFlight(t *testing.T) {
	n := filled(t)
	conn := newFakeConn(withhold)
	n.start(lonely(n, always(conn), relay.Options{Window: 7, AckTimeout: time.Hour, Grace: time.Millisecond}).Run)
	mqtttest.Eventually(t, "the window is full", func() bool { return conn.published() == 7 })
	for n.stats().Pending > 0 {
		conn.release()
		conn.mu.Lock()
		open := 0
		for _, d := range conn.sent {
			select {
			case <-d.done:
			default:
				open++
			}
		}
		conn.mu.Unlock()
		if open > 7 {
			t.Fatalf("%d records in flight in a window of 7", open)
		}
	}
}

// An order to a device must not arrive two days late: an expired message is counted and not sent, and what follows is.
func TestExpiredMessageIsNotSent(t *testing.T) {
	n := newNode(t)
	_, err := executor.Submit(n.ctx, n.store, executor.Input{Tenant: "t", Agent: "mixed", Run: "r", Type: "expiring", Data: []byte("1"), Source: "cli"})
	if err != nil {
		t.Fatal(err)
	}
	n.await([]runKey{{"t", "r"}}, "idle")
	conn := newFakeConn(ack)
	n.start(lonely(n, always(conn), relay.Options{}).Run)
	n.awaitShipped()
	conn.mu.Lock()
	defer conn.mu.Unlock()
	var topics []string
	for _, d := range conn.sent {
		topics = append(topics, d.topic)
	}
	events := record.Topics{Root: root}.Events("t", nodeName, "r")
	if want := []string{events, "plant/late"}; !slices.Equal(topics, want) {
		t.Errorf("sent to %v, want %v", topics, want)
	}
	if s := n.stats(); s.Expired != 1 || s.Shipped != 2 || s.Pending != 0 {
		t.Errorf("%+v", s)
	}
	if c := n.count("SELECT count(*) FROM record_state WHERE state = 'expired' AND destination = 'plant/lamp/set'"); c != 1 {
		t.Error("the record does not say that it expired")
	}
}

// A record that a rewind withheld in its own row, as a handed-over input is, is not sent, and the mark passes over it.
func TestWithheldRecordIsPassedOver(t *testing.T) {
	n := newNode(t)
	_, err := executor.Submit(n.ctx, n.store, executor.Input{Tenant: "t", Agent: "mixed", Run: "r", ID: "1", Type: "go", Data: []byte("1"), Source: "cli"})
	if err != nil {
		t.Fatal(err)
	}
	n.await([]runKey{{"t", "r"}}, "idle")
	err = n.store.Write(n.ctx, func(ctx context.Context, tx *sqlite.Tx) error {
		changed, _, err := tx.Exec(ctx, "UPDATE outbox SET withheld_us = ? WHERE kind = ?", tx.NowUS, record.Command)
		if err == nil && changed != 1 {
			err = fmt.Errorf("%d commands", changed)
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	conn := newFakeConn(ack)
	n.start(lonely(n, always(conn), relay.Options{}).Run)
	n.awaitShipped()
	conn.mu.Lock()
	defer conn.mu.Unlock()
	var topics []string
	for _, d := range conn.sent {
		topics = append(topics, d.topic)
	}
	events := record.Topics{Root: root}.Events("t", nodeName, "r")
	if want := []string{events, events, "plant/lamp/set"}; !slices.Equal(topics, want) { // the command was before the message
		t.Errorf("sent to %v, want %v", topics, want)
	}
	if c := n.count("SELECT count(*) FROM branch WHERE shipped = 4 AND exportable = 4"); c != 1 {
		t.Error("the mark did not pass over it")
	}
}

// Each kind of record goes to its topic in its form.
func TestRecordsGoToTheirTopics(t *testing.T) {
	n := newNode(t)
	_, err := executor.Submit(n.ctx, n.store, executor.Input{Tenant: "t", Agent: "mixed", Run: "r", ID: "1", Type: "go", Data: []byte("1"), Source: "cli"})
	if err != nil {
		t.Fatal(err)
	}
	conn := newFakeConn(ack)
	n.start(lonely(n, always(conn), relay.Options{}).Run)
	mqtttest.Eventually(t, "all is published", func() bool { return conn.published() == 4 })
	conn.mu.Lock()
	defer conn.mu.Unlock()
	events := record.Topics{Root: root}.Events("t", nodeName, "r")
	if e := conn.sent[1]; e.topic != events || e.retain || !strings.HasSuffix(e.payload, `"data":{"a": 0.10}}`) {
		t.Errorf("event: %+v", e)
	}
	c := conn.sent[2]
	r, err := record.ParseCloudEvent([]byte(c.payload))
	if err != nil || c.topic != root+"/v1/t/nodes/hq/inbox" || c.retain || r.Kind != record.Command || r.ToAgent != "billing" || r.ToRun != "inv-7" ||
		r.InputID != "pr:"+nodeName+"/t/r/c-1" || r.Hops != 1 || r.LSN != 3 {
		t.Errorf("command: %+v, %+v, %v", c, r, err)
	}
	if m := conn.sent[3]; m.topic != "plant/lamp/set" || !m.retain || m.payload != "\x00\xff" {
		t.Errorf("message: %+v", m)
	}
}
