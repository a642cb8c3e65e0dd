package relay_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"

	"postrider/executor"
	"postrider/internal/agent"
	"postrider/internal/mqtt"
	"postrider/internal/mqtttest"
	"postrider/internal/record"
	"postrider/internal/sqlite"
	"postrider/outbox"
	"postrider/relay"
)

const (
	nodeTopic  = "postrider/v1/acme/nodes/n1/inbox"
	agentTopic = "postrider/v1/acme/agents/counter/inbox"
)

// door is a Receive that notes what it took in.
type door struct {
	mu     sync.Mutex
	calls  int
	taken  []string                               // data, in order
	answer func(n int, in []record.Inbound) error // of the nth call; nil: all is taken
}

func (d *door) receive(_ context.Context, in []record.Inbound) ([]record.Outcome, error) {
	d.mu.Lock()
	d.calls++
	n := d.calls
	d.mu.Unlock()
	if d.answer != nil {
		if err := d.answer(n, in); err != nil {
			return nil, err
		}
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	out := make([]record.Outcome, len(in))
	for i := range in {
		d.taken = append(d.taken, string(in[i].Data))
		out[i] = record.Stored
	}
	return out, nil
}

func (d *door) all() []string {
	d.mu.Lock()
	defer d.mu.Unlock()
	return slices.Clone(d.taken)
}

func (d *door) called() int {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.calls
}

func (d *door) await(t *testing.T, want ...string) {
	t.Helper()
	mqtttest.Eventually(t, fmt.Sprintf("inputs %.200q", want), func() bool { return len(d.all()) >= len(want) })
	if got := d.all(); !slices.Equal(got, want) {
		t.Errorf("got %.300q\nwant %.300q", got, want)
	}
}

// post is the database of a node without an executor.
type post struct {
	t     *testing.T
	store *sqlite.Store
	box   *outbox.Outbox
}

func newPost(t *testing.T) *post {
	t.Helper()
	text, err := os.ReadFile("../schema.sql")
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(t.TempDir(), "node.db")
	store, err := sqlite.Open(t.Context(), path, sqlite.NodeSchema(string(text), nodeName, path), sqlite.Options{Create: true})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := store.Close(); err != nil {
			t.Error(err)
		}
	})
	return &post{t, store, outbox.New(store, nodeName)}
}

func inlets(t *testing.T, rules ...string) *record.Inlets {
	t.Helper()
	in := &record.Inlets{Node: nodeName, Public: []string{"counter"}}
	for _, s := range rules {
		r, err := record.ParseRule(s)
		if err != nil {
			t.Fatal(err)
		}
		in.Rules = append(in.Rules, r)
	}
	if err := in.Check(); err != nil {
		t.Fatal(err)
	}
	return in
}

func (p *post) receiver(broker string, in *record.Inlets, receive relay.Receive, o relay.ReceiverOptions) *relay.Receiver {
	if o.BackoffMax == 0 {
		o.BackoffMax = 50 * time.Millisecond
	}
	return relay.NewReceiver(p.box, in, mqtt.Options{Broker: broker, ClientID: "relay-of-n1-in"}, receive, o)
}

// run runs a relay with the receiver until stop is called or the test ends.
func (p *post) run(broker string, v *relay.Receiver) (stop func()) {
	p.t.Helper()
	return (&node{t: p.t, ctx: p.t.Context()}).start(newRelay(p.store, broker, nil, relay.Options{Receiver: v}).Run)
}

func awaitUp(t *testing.T, v *relay.Receiver) {
	t.Helper()
	mqtttest.Eventually(t, "inputs are subscribed", func() bool { trouble, err := v.Health(); return trouble == "" && err == nil })
}

func awaitTrouble(t *testing.T, v *relay.Receiver, want string) {
	t.Helper()
	mqtttest.Eventually(t, "trouble: "+want, func() bool { trouble, err := v.Health(); return strings.Contains(trouble, want) && err == nil })
}

// sender publishes payloads and waits for their PUBACKs.
func sender(t *testing.T, broker string) func(topic string, payloads ...string) {
	t.Helper()
	c, err := mqtt.Dial(t.Context(), mqtt.Options{Broker: broker, ClientID: "sender"})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(c.Close)
	return func(topic string, payloads ...string) {
		t.Helper()
		var list []mqtt.Delivery
		for _, payload := range payloads {
			list = append(list, c.Publish(topic, false, []byte(payload)))
		}
		for _, d := range list {
			select {
			case <-d.Done():
			case <-time.After(patience):
				t.Fatal("a message without PUBACK")
			}
			if err := d.Error(); err != nil {
				t.Fatal(err)
			}
		}
	}
}

func order(id int) string {
	return fmt.Sprintf(`{"specversion":"1.0","id":"%d","source":"/shop","type":"order","toagent":"counter","torun":"r","data":%d}`, id, id)
}

func numbers(from, to int) (payloads, data []string) {
	for i := from; i < to; i++ {
		payloads, data = append(payloads, order(i)), append(data, fmt.Sprint(i))
	}
	return payloads, data
}

func TestInputsAreAcknowledgedAfterTheirCommit(t *testing.T) {
	b, p := startBroker(t), newPost(t)
	proxy := mqtttest.NewProxy(t, b.Addr())
	committing, commit := make(chan struct{}), make(chan struct{})
	d := &door{answer: func(int, []record.Inbound) error { committing <- struct{}{}; <-commit; return nil }}
	v := p.receiver(proxy.URL(), inlets(t), d.receive, relay.ReceiverOptions{})
	p.run(b.URL(), v)
	awaitUp(t, v)
	send := sender(t, b.URL())
	send(nodeTopic, order(1))
	wait(t, committing)
	// A second message goes all the way while the first is being committed.
	proxy.Await("the first message", func(c mqtttest.Counts) bool { return c.Delivered == 1 })
	send(nodeTopic, order(2))
	proxy.Await("the second message", func(c mqtttest.Counts) bool { return c.Delivered == 2 })
	if n := proxy.Counts().ClientPubacks; n != 0 {
		t.Fatalf("%d PUBACKs before the commit", n)
	}
	commit <- struct{}{}
	proxy.Await("its PUBACK", func(c mqtttest.Counts) bool { return c.ClientPubacks == 1 })
	wait(t, committing)
	commit <- struct{}{}
	proxy.Await("the other PUBACK", func(c mqtttest.Counts) bool { return c.ClientPubacks == 2 })
	d.await(t, "1", "2")
}

// What was committed and not acknowledged comes again, and is offered again.
func TestCutBetweenCommitAndAcknowledgement(t *testing.T) {
	b, p := startBroker(t), newPost(t)
	proxy := mqtttest.NewProxy(t, b.Addr())
	d := &door{answer: func(n int, _ []record.Inbound) error {
		if n == 1 {
			proxy.Cut()
		}
		return nil
	}}
	v := p.receiver(proxy.URL(), inlets(t), d.receive, relay.ReceiverOptions{})
	p.run(b.URL(), v)
	awaitUp(t, v)
	sender(t, b.URL())(nodeTopic, order(1))
	proxy.Await("its PUBACK", func(c mqtttest.Counts) bool { return c.ClientPubacks > 0 && c.Redelivered > 0 && c.Connects == 2 })
	d.await(t, "1", "1")
}

func TestSessionIsKept(t *testing.T) {
	b, p := startBroker(t), newPost(t)
	proxy := mqtttest.NewProxy(t, b.Addr())
	d := &door{}
	v := p.receiver(proxy.URL(), inlets(t), d.receive, relay.ReceiverOptions{})
	stop := p.run(b.URL(), v)
	awaitUp(t, v)
	send := sender(t, b.URL())
	payloads, want := numbers(0, 300)

	proxy.Refuse(true)
	proxy.Cut()
	awaitTrouble(t, v, "refused")      // an outage with attempts to connect in it
	send(nodeTopic, payloads[:100]...) // while the connection is away
	proxy.Refuse(false)
	d.await(t, want[:100]...)
	awaitUp(t, v)
	if n := proxy.Counts().Subscribes; n != 1 {
		t.Errorf("%d SUBSCRIBEs of one process whose session was kept", n)
	}

	stop()
	if trouble, _ := v.Health(); trouble == "" {
		t.Error("no trouble after the end")
	}
	send(nodeTopic, payloads[100:200]...) // while no process runs
	v = p.receiver(proxy.URL(), inlets(t), d.receive, relay.ReceiverOptions{})
	p.run(b.URL(), v)
	d.await(t, want[:200]...)
	awaitUp(t, v)
	if n := proxy.Counts().Subscribes; n != 1 {
		t.Errorf("%d SUBSCRIBEs of two processes whose session was kept", n)
	}

	// A broker without the session.
	other := startBroker(t)
	proxy.SetTarget(other.Addr())
	proxy.Cut()
	proxy.Await("it is told again", func(c mqtttest.Counts) bool { return c.Subscribes == 2 })
	awaitUp(t, v)
	sender(t, other.URL())(nodeTopic, payloads[200:]...)
	d.await(t, want...)
}

// The broker has lost its sessions. It makes an empty one of the CONNECT, and says on the next connection that it has kept
// it: a connection or a process that ends in between must not leave a node that hears nothing.
func TestEmptySessionIsNotTakenForSubscribed(t *testing.T) {
	for name, gone := range map[string]func(packet mqtttest.Packet, up bool) bool{
		"before the SUBSCRIBE": func(packet mqtttest.Packet, up bool) bool { return up && packet.Type == mqtttest.Subscribe },
		"before the CONNACK":   func(packet mqtttest.Packet, up bool) bool { return !up && packet.Type == mqtttest.Connack },
	} {
		for _, restart := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s, restart %v", name, restart), func(t *testing.T) {
				before, after, p := startBroker(t), startBroker(t), newPost(t)
				proxy := mqtttest.NewProxy(t, before.Addr())
				d := &door{}
				v := p.receiver(proxy.URL(), inlets(t), d.receive, relay.ReceiverOptions{})
				stop := p.run(after.URL(), v)
				awaitUp(t, v)

				var mu sync.Mutex
				cuts, cutting := 0, true
				proxy.OnPacket(func(packet mqtttest.Packet, up bool) mqtttest.Verdict {
					mu.Lock()
					defer mu.Unlock()
					if !gone(packet, up) || !cutting {
						return mqtttest.Pass
					}
					cuts++
					cutting = restart // without one, the next connection stays
					return mqtttest.CutBefore
				})
				proxy.SetTarget(after.Addr())
				proxy.Cut()
				mqtttest.Eventually(t, "the connection ends", func() bool { mu.Lock(); defer mu.Unlock(); return cuts > 0 })
				if restart {
					stop()
					mu.Lock()
					cutting = false
					mu.Unlock()
					v = p.receiver(proxy.URL(), inlets(t), d.receive, relay.ReceiverOptions{})
					p.run(after.URL(), v)
				}
				// Connected is not enough: the SUBACK is on record.
				mqtttest.Eventually(t, "the filters are granted again", func() bool { return p.value("SELECT min(granted) FROM subscription") == 1 })
				awaitUp(t, v)
				sender(t, after.URL())(nodeTopic, order(1))
				d.await(t, "1")
			})
		}
	}
}

// A broker that refuses a connection has looked at no session: nothing is subscribed again, now or by the next process.
func TestRefusedConnectionLeavesTheSession(t *testing.T) {
	f, b, p := mqtttest.NewFake(t), startBroker(t), newPost(t)
	proxy := mqtttest.NewProxy(t, b.Addr())
	v := p.receiver(proxy.URL(), inlets(t), (&door{}).receive, relay.ReceiverOptions{})
	stop := p.run(b.URL(), v)
	awaitUp(t, v)
	f.OnConnect(func(int) int { return 3 })
	for range 2 {
		proxy.SetTarget(f.Addr())
		proxy.Cut()
		awaitTrouble(t, v, "server unavailable")
		stop()
		v = p.receiver(proxy.URL(), inlets(t), (&door{}).receive, relay.ReceiverOptions{})
		stop = p.run(b.URL(), v)
		awaitTrouble(t, v, "server unavailable")
		proxy.SetTarget(b.Addr())
		awaitUp(t, v)
	}
	if n := proxy.Counts().Subscribes; n != 1 {
		t.Errorf("%d SUBSCRIBEs for a session that was kept", n)
	}
}

// Until the SUBACK, which comes behind all that the session had kept, no process may count on the session.
func TestSubscriptionIsOnRecordAfterItsSuback(t *testing.T) {
	b, p := startBroker(t), newPost(t)
	v := p.receiver(b.URL(), inlets(t), (&door{}).receive, relay.ReceiverOptions{})
	stop := p.run(b.URL(), v)
	awaitUp(t, v)
	mqtttest.Eventually(t, "the SUBACK is on record", func() bool { return p.value("SELECT min(granted) FROM subscription") == 1 })
	stop()
	p.forgetGrants()
	payloads, _ := numbers(0, 2000)
	sender(t, b.URL())(nodeTopic, payloads...)
	called, end := make(chan struct{}, 1), make(chan struct{})
	d := &door{answer: func(n int, _ []record.Inbound) error {
		if n == 1 {
			close(called)
		}
		<-end
		return nil
	}}
	v = p.receiver(b.URL(), inlets(t), d.receive, relay.ReceiverOptions{})
	stop = p.run(b.URL(), v)
	wait(t, called)
	if p.value("SELECT max(granted) FROM subscription") != 0 {
		t.Error("the filters are on record before their SUBACK")
	}
	close(end)
	stop()
}

// A connection that ends before the SUBACK, which comes behind all that the session had kept, leaves the next one to
// subscribe again.
func TestUnconfirmedSubscriptionIsRepeated(t *testing.T) {
	b, p := startBroker(t), newPost(t)
	proxy := mqtttest.NewProxy(t, b.Addr())
	v := p.receiver(proxy.URL(), inlets(t), (&door{}).receive, relay.ReceiverOptions{})
	stop := p.run(b.URL(), v)
	awaitUp(t, v)
	stop()
	p.forgetGrants() // as if it had ended before
	payloads, want := numbers(0, 2000)
	sender(t, b.URL())(nodeTopic, payloads...)

	d := &door{answer: func(n int, _ []record.Inbound) error {
		if n == 1 {
			proxy.Cut()
			return errors.New("it is lost meanwhile")
		}
		return nil
	}}
	v = p.receiver(proxy.URL(), inlets(t), d.receive, relay.ReceiverOptions{})
	p.run(b.URL(), v)
	proxy.Await("a third SUBSCRIBE", func(c mqtttest.Counts) bool { return c.Subscribes == 3 })
	mqtttest.Eventually(t, "all inputs", func() bool { // some of them twice
		got := map[string]bool{}
		for _, data := range d.all() {
			got[data] = true
		}
		return len(got) == len(want)
	})
}

// A database that takes nothing: what came is kept and tried again on the same connection, then on others.
func TestFailingCommitIsTriedAgain(t *testing.T) {
	for name, cause := range map[string]error{"locked": sqlite.ErrBusy, "full": sqlite.ErrFull} {
		t.Run(name, func(t *testing.T) {
			b, p := startBroker(t), newPost(t)
			proxy := mqtttest.NewProxy(t, b.Addr())
			var mu sync.Mutex
			failing := 3
			fail := func(n int) { mu.Lock(); defer mu.Unlock(); failing = n }
			d := &door{answer: func(int, []record.Inbound) error {
				mu.Lock()
				defer mu.Unlock()
				if failing == 0 {
					return nil
				}
				failing--
				return fmt.Errorf("store inputs: %w", cause)
			}}
			v := p.receiver(proxy.URL(), inlets(t), d.receive, relay.ReceiverOptions{KeepFor: 300 * time.Millisecond})
			p.run(b.URL(), v)
			awaitUp(t, v)
			send := sender(t, b.URL())
			send(nodeTopic, order(0))
			d.await(t, "0")
			if c := proxy.Counts(); c.Connects != 1 || d.called() != 4 {
				t.Errorf("%d connections, %d calls", c.Connects, d.called())
			}
			awaitUp(t, v)

			fail(1 << 30)
			payloads, want := numbers(1, 50)
			send(nodeTopic, payloads...)
			awaitTrouble(t, v, cause.Error())
			proxy.Await("the connection is renewed", func(c mqtttest.Counts) bool { return c.Connects >= 3 && c.Redelivered >= 49 })
			if n := proxy.Counts().ClientPubacks; n != 1 {
				t.Errorf("%d PUBACKs, one message was stored", n)
			}
			awaitTrouble(t, v, cause.Error())
			fail(0)
			d.await(t, append([]string{"0"}, want...)...)
			awaitUp(t, v)
			proxy.Await("all PUBACKs", func(c mqtttest.Counts) bool { return c.ClientPubacks >= 50 })
		})
	}
}

func TestPanicEndsTheSessionOnly(t *testing.T) {
	b, p := startBroker(t), newPost(t)
	d := &door{answer: func(n int, _ []record.Inbound) error {
		if n == 1 {
			panic("broken")
		}
		return nil
	}}
	v := p.receiver(b.URL(), inlets(t), d.receive, relay.ReceiverOptions{})
	p.run(b.URL(), v)
	awaitUp(t, v)
	sender(t, b.URL())(nodeTopic, order(1))
	d.await(t, "1")
}

func TestAcknowledgementsAreInOrder(t *testing.T) {
	f, p := mqtttest.NewFake(t), newPost(t)
	d := &door{}
	v := p.receiver(f.URL(), inlets(t), d.receive, relay.ReceiverOptions{})
	b := startBroker(t)
	p.run(b.URL(), v)
	awaitUp(t, v)
	ids := []uint16{7, 3, 500, 1, 2, 65535, 4}
	var raw []byte
	for i, id := range ids {
		payload := order(i)
		raw = append(raw, mqtttest.Publish<<4|2)
		for n := 4 + len(nodeTopic) + len(payload); ; n >>= 7 {
			if n < 128 {
				raw = append(raw, byte(n))
				break
			}
			raw = append(raw, byte(n)|128)
		}
		raw = append(append(raw, 0, byte(len(nodeTopic))), nodeTopic...)
		raw = append(append(raw, byte(id>>8), byte(id)), payload...)
	}
	f.Send(1, raw...)
	mqtttest.Eventually(t, "all PUBACKs", func() bool { return len(f.Acked()) == len(ids) })
	if got := f.Acked(); !slices.Equal(got, ids) {
		t.Errorf("acknowledged %v, came %v", got, ids)
	}
	_, want := numbers(0, len(ids))
	d.await(t, want...)
}

// What is wrong never holds up what is right, and all of it is counted. With the executor behind it.
func TestMalformedNeverBlocks(t *testing.T) {
	b, p := startBroker(t), newPost(t)
	proxy := mqtttest.NewProxy(t, b.Addr())
	reg := prometheus.NewRegistry()
	n := &node{t: t, ctx: t.Context()}
	quiet := agent.Func(func(context.Context, agent.Step) (agent.Effects, error) { return agent.Effects{}, nil })
	n.start(executor.New(p.store, nodeName, map[string]agent.Agent{"counter": quiet}, executor.Options{Topics: record.Topics{Root: root}}).Run)
	mqtttest.Eventually(t, "the agent is hosted", func() bool {
		var hosted int
		err := p.store.Get(t.Context(), "SELECT count(*) FROM agent", nil, &hosted)
		return err == nil && hosted == 1
	})
	receive := func(ctx context.Context, in []record.Inbound) ([]record.Outcome, error) {
		return executor.Receive(ctx, p.store, in)
	}
	v := p.receiver(proxy.URL(), inlets(t, "plant/+/temp=counter/{1}", "plant/#=counter/log"), receive, relay.ReceiverOptions{Metrics: reg})
	p.run(b.URL(), v)
	awaitUp(t, v)
	send := sender(t, b.URL())
	send(nodeTopic, order(1), "garbage", order(1), strings.Replace(order(1), `"data":1`, `"data":2`, 1), strings.Replace(order(9), "counter", "nobody", 1), order(2))
	send(agentTopic, "\xff\x00", strings.Repeat("x", 10<<20), order(3))
	send("plant/a b/temp", "1") // no run of that name, and a good one for the other rule
	send("plant/a/temp", "2")
	proxy.Await("all PUBACKs", func(c mqtttest.Counts) bool { return c.ClientPubacks == 11 })
	got := map[string]float64{}
	families, err := reg.Gather()
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range families {
		for _, m := range f.Metric {
			if f.GetName() == "postrider_inbound_messages_total" {
				got[m.Label[0].GetValue()] = m.Counter.GetValue()
			}
		}
	}
	// stored: 1, 2, the bytes, 3, one of the first plant message, two of the second
	want := map[string]float64{"stored": 7, "duplicate": 1, "conflict": 1, "dead": 4, "unmatched": 0}
	for outcome, n := range want {
		if got[outcome] != n {
			t.Errorf("%s: %g, want %g; %v", outcome, got[outcome], n, got)
		}
	}
	var dead int
	if err := p.store.Get(t.Context(), "SELECT count(*) FROM inbox WHERE outcome = 'dead' AND reason <> ''", nil, &dead); err != nil || dead != 5 {
		t.Errorf("%d dead letters with reasons, %v", dead, err)
	}
	if problems, err := testutil.GatherAndLint(reg); err != nil || len(problems) > 0 {
		t.Error(problems, err)
	}
}

func TestDroppedFiltersAreUnsubscribed(t *testing.T) {
	b, p := startBroker(t), newPost(t)
	proxy := mqtttest.NewProxy(t, b.Addr())
	d := &door{}
	v := p.receiver(proxy.URL(), inlets(t, "a/+=counter/a", "b/#=counter/b"), d.receive, relay.ReceiverOptions{})
	stop := p.run(b.URL(), v)
	awaitUp(t, v)
	send := sender(t, b.URL())
	send("b/1", "1")
	raw := func(topic, json string) string {
		return fmt.Sprintf(`{"topic":%q,"json":%s,"retained":false}`, topic, json)
	}
	d.await(t, raw("b/1", "1"))
	stop()
	send("b/1", "2", "3")
	send("a/1", "4")

	reg := prometheus.NewRegistry()
	v = p.receiver(proxy.URL(), inlets(t, "a/+=counter/a"), d.receive, relay.ReceiverOptions{Metrics: reg})
	p.run(b.URL(), v)
	d.await(t, raw("b/1", "1"), raw("a/1", "4"))
	filters := func() (list []string) {
		rows, err := p.store.Reader().QueryContext(t.Context(), "SELECT filter FROM subscription ORDER BY filter")
		if err != nil {
			t.Fatal(err)
		}
		defer rows.Close()
		for rows.Next() {
			var f string
			if err := rows.Scan(&f); err != nil {
				t.Fatal(err)
			}
			list = append(list, f)
		}
		if err := rows.Err(); err != nil {
			t.Fatal(err)
		}
		return list
	}
	mqtttest.Eventually(t, "the filter is forgotten", func() bool { return !slices.Contains(filters(), "b/#") })
	if got := filters(); !slices.Equal(got, []string{"a/+", "postrider/v1/+/agents/counter/inbox", "postrider/v1/+/nodes/n1/inbox"}) {
		t.Errorf("subscriptions on record: %v", got)
	}
	delivered := proxy.Counts().Delivered
	send("b/1", "5")
	send("a/1", "6")
	d.await(t, raw("b/1", "1"), raw("a/1", "4"), raw("a/1", "6"))
	if n := proxy.Counts().Delivered; n != delivered+1 {
		t.Errorf("%d messages came, one was subscribed", n-delivered)
	}
	if n := proxy.Counts().Unsubscribes; n != 1 {
		t.Errorf("%d UNSUBSCRIBEs", n)
	}
	if err := testutil.GatherAndCompare(reg, strings.NewReader(`# HELP postrider_inbound_messages_total Inputs made of messages, once for each agent that gets one, by what became of them; unmatched: of none, the message was dropped.
# TYPE postrider_inbound_messages_total counter
postrider_inbound_messages_total{outcome="conflict"} 0
postrider_inbound_messages_total{outcome="dead"} 0
postrider_inbound_messages_total{outcome="duplicate"} 0
postrider_inbound_messages_total{outcome="stored"} 2
postrider_inbound_messages_total{outcome="unmatched"} 2
`), "postrider_inbound_messages_total"); err != nil {
		t.Error(err)
	}
}

// One of the two connections failing does not stop the other.
func TestReceivingAndShippingAreIndependent(t *testing.T) {
	b := startBroker(t)
	t.Run("inputs' broker hangs", func(t *testing.T) {
		n := newNode(t)
		v := (&post{t, n.store, n.box}).receiver(mqtttest.Silent(t), inlets(t), (&door{}).receive, relay.ReceiverOptions{})
		n.startRelay(b.URL(), nil, relay.Options{Receiver: v})
		keys := someRuns(1, 1)
		n.feed(keys, 5, "go")
		n.awaitShipped()
		awaitTrouble(t, v, "not subscribed")
	})
	t.Run("shipping's broker hangs", func(t *testing.T) {
		p, d := newPost(t), &door{}
		v := p.receiver(b.URL(), inlets(t), d.receive, relay.ReceiverOptions{})
		p.run(mqtttest.Silent(t), v)
		awaitUp(t, v)
		sender(t, b.URL())(nodeTopic, order(1))
		d.await(t, "1")
	})
}

// Only the process that ships receives.
func TestReceiverRunsWhereTheLockIs(t *testing.T) {
	b, p, d := startBroker(t), newPost(t), &door{}
	first := p.receiver(b.URL(), inlets(t), d.receive, relay.ReceiverOptions{})
	stop := p.run(b.URL(), first)
	awaitUp(t, first)
	proxy := mqtttest.NewProxy(t, b.Addr())
	second := p.receiver(proxy.URL(), inlets(t), d.receive, relay.ReceiverOptions{})
	waits := newRelay(p.store, b.URL(), nil, relay.Options{Receiver: second})
	(&node{t: t, ctx: t.Context()}).start(waits.Run)
	mqtttest.Eventually(t, "the second relay waits", func() bool { trouble, _ := waits.Health(); return strings.HasPrefix(trouble, "another relay") })
	awaitTrouble(t, second, "does not hold the lock")
	sender(t, b.URL())(nodeTopic, order(1))
	d.await(t, "1")
	if n := proxy.Counts().Connections; n != 0 {
		t.Errorf("the second receiver connected %d times", n)
	}
	stop()
	awaitUp(t, second)
	awaitTrouble(t, first, "does not hold the lock")
}

// The end waits for the commit in hand and acknowledges it, but not for ever.
func TestEndDuringACommit(t *testing.T) {
	b, p := startBroker(t), newPost(t)
	proxy := mqtttest.NewProxy(t, b.Addr())
	committing, commit := make(chan struct{}), make(chan struct{})
	hang := false
	receive := func(ctx context.Context, in []record.Inbound) ([]record.Outcome, error) {
		close(committing)
		if hang {
			<-ctx.Done()
			return nil, context.Cause(ctx)
		}
		<-commit
		return nil, ctx.Err()
	}
	v := p.receiver(proxy.URL(), inlets(t), receive, relay.ReceiverOptions{Grace: patience})
	stop := p.run(b.URL(), v)
	awaitUp(t, v)
	send := sender(t, b.URL())
	send(nodeTopic, order(1))
	wait(t, committing)
	ended := make(chan struct{})
	go func() { defer close(ended); stop() }()
	time.AfterFunc(50*time.Millisecond, func() { close(commit) }) // most likely after the end was told
	wait(t, ended)
	if n := proxy.Counts().ClientPubacks; n != 1 {
		t.Errorf("%d PUBACKs of the input that was committed", n)
	}

	hang, committing = true, make(chan struct{})
	v = p.receiver(proxy.URL(), inlets(t), receive, relay.ReceiverOptions{Grace: 50 * time.Millisecond})
	stop = p.run(b.URL(), v)
	awaitUp(t, v)
	send(nodeTopic, order(2))
	wait(t, committing)
	stop() // fails the test when it does not end
	if n := proxy.Counts().ClientPubacks; n != 1 {
		t.Errorf("%d PUBACKs, one input was committed", n)
	}
}

// value is one number of the database.
func (p *post) value(query string) (n int64) {
	p.t.Helper()
	if err := p.store.Get(p.t.Context(), query, nil, &n); err != nil {
		p.t.Fatal(err)
	}
	return n
}

// forgetGrants has the database not know of any SUBACK.
func (p *post) forgetGrants() {
	p.t.Helper()
	err := p.store.Write(p.t.Context(), func(ctx context.Context, tx *sqlite.Tx) error {
		_, _, err := tx.Exec(ctx, "UPDATE subscription SET granted = 0")
		return err
	})
	if err != nil {
		p.t.Fatal(err)
	}
}

// A retained message is an input as any other, and says so.
func TestRetainedMessages(t *testing.T) {
	b, p, d := startBroker(t), newPost(t), &door{}
	c, err := mqtt.Dial(t.Context(), mqtt.Options{Broker: b.URL(), ClientID: "sender"})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(c.Close)
	r := c.Publish("plant/a/temp", true, []byte("21.50"))
	<-r.Done()
	if err := r.Error(); err != nil {
		t.Fatal(err)
	}
	v := p.receiver(b.URL(), inlets(t, "plant/+/temp=counter/{1}"), d.receive, relay.ReceiverOptions{})
	stop := p.run(b.URL(), v)
	d.await(t, `{"topic":"plant/a/temp","json":21.50,"retained":true}`)
	awaitUp(t, v)
	stop()

	// A restart is no reason to have it again.
	v = p.receiver(b.URL(), inlets(t, "plant/+/temp=counter/{1}"), d.receive, relay.ReceiverOptions{})
	p.run(b.URL(), v)
	awaitUp(t, v)
	sender(t, b.URL())("plant/b/temp", "2")
	d.await(t, `{"topic":"plant/a/temp","json":21.50,"retained":true}`, `{"topic":"plant/b/temp","json":2,"retained":false}`)
}

// best is a Forward whose inputs a test gives.
type best struct {
	mu   sync.Mutex
	due  []int64
	errs []error
	n    int // calls
	do   func(ctx context.Context, n int)
}

func (f *best) forward(ctx context.Context, send func(ctx context.Context, r *record.Record) error) (n int, err error) {
	f.mu.Lock()
	f.n++
	calls, due := f.n, slices.Clone(f.due)
	f.mu.Unlock()
	if f.do != nil {
		f.do(ctx, calls)
	}
	for _, lsn := range due {
		err := send(ctx, &record.Record{Node: nodeName, Key: record.BranchKey{Tenant: "acme", Run: record.NodeRun, Branch: "01ARZ3NDEKTSV4RRFFQ69G5FAV"}, LSN: lsn, Gen: 1,
			Kind: record.Command, Type: "t", Data: []byte("null"), ToNode: "hq", ToAgent: "billing", ToRun: "r", InputID: "x"})
		f.mu.Lock()
		f.errs = append(f.errs, err)
		if err == nil {
			f.due = f.due[1:] // retire
		}
		f.mu.Unlock()
		if err != nil {
			return n, err
		}
		n++
	}
	return n, nil
}

func (f *best) left() (due int, errs []error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	return len(f.due), slices.Clone(f.errs)
}

// send, retire: without its PUBACK on this connection nothing counts as sent, and the order stays.
func TestForwardNeedsPuback(t *testing.T) {
	broker, n := mqtttest.NewFake(t), newPost(t)
	seen := 0
	broker.OnPublish(func(mqtttest.FakePublish) mqtttest.Answer {
		switch seen++; seen {
		case 2:
			return mqtttest.Ignore
		case 3:
			return mqtttest.Close
		}
		return mqtttest.Ack
	})
	f := &best{due: []int64{1, 2, 3}}
	(&node{t: t, ctx: t.Context()}).start(newRelay(n.store, broker.URL(), nil, relay.Options{
		Forward: f.forward, Poll: 10 * time.Millisecond, AckTimeout: 200 * time.Millisecond, BackoffMin: time.Millisecond, BackoffMax: 10 * time.Millisecond,
	}).Run)
	mqtttest.Eventually(t, "all are sent", func() bool { due, _ := f.left(); return due == 0 })
	_, errs := f.left()
	if len(errs) != 5 || errs[0] != nil || !errors.Is(errs[1], mqtt.ErrTimeout) || errs[2] == nil || errs[3] != nil || errs[4] != nil {
		t.Errorf("outcomes %v", errs)
	}
	var ids []string
	for _, p := range broker.Published() {
		r, err := record.ParseCloudEvent([]byte(p.Payload))
		if err != nil || p.Topic != "postrider/v1/acme/nodes/hq/inbox" || p.Retain {
			t.Errorf("%+v: %v", p, err)
		}
		ids = append(ids, fmt.Sprint(r.LSN))
	}
	if got := strings.Join(ids, " "); got != "1 2 2 2 3" {
		t.Errorf("sent %s", got)
	}
}

// Whatever Forward does, records are shipped, and it is tried again.
func TestForwardNeverStopsShipping(t *testing.T) {
	for name, do := range map[string]func(ctx context.Context, n int){
		"panics": func(context.Context, int) { panic("broken") },
		"hangs":  func(ctx context.Context, _ int) { <-ctx.Done() },
	} {
		t.Run(name, func(t *testing.T) {
			b, n := startBroker(t), newNode(t)
			f := &best{do: do}
			stop := n.startRelay(b.URL(), nil, relay.Options{Forward: f.forward, Poll: time.Millisecond, BackoffMin: time.Millisecond, Metrics: n.reg})
			mqtttest.Eventually(t, "it is called", func() bool { f.mu.Lock(); defer f.mu.Unlock(); return f.n > 0 })
			n.feed(someRuns(1, 2), 20, "go")
			n.awaitShipped()
			if name == "panics" {
				mqtttest.Eventually(t, "it is called again", func() bool { f.mu.Lock(); defer f.mu.Unlock(); return f.n > 3 })
			}
			stop()
			if err := testutil.GatherAndCompare(n.reg, strings.NewReader("# HELP postrider_relay_sessions_total Connections that were established.\n"+
				"# TYPE postrider_relay_sessions_total counter\npostrider_relay_sessions_total 1\n"), "postrider_relay_sessions_total"); err != nil {
				t.Error(err)
			}
		})
	}
}
