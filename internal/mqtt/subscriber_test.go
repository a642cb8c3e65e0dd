package mqtt_test

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	"postrider/internal/mqtt"
	"postrider/internal/mqtttest"
)

func TestKeptSessionGetsWhatArrivedWhileOffline(t *testing.T) {
	b := startBroker(t)
	s := subscribe(t, mqtt.Options{Broker: b.URL()}, mqtt.Subscription{})
	if s.SessionPresent() {
		t.Fatal("a session before the first connection")
	}
	s.Close()
	publishAll(t, dial(t, mqtt.Options{Broker: b.URL()}), "t/1", 0, 3000) // more than a buffer
	s = subscribe(t, mqtt.Options{Broker: b.URL()}, mqtt.Subscription{})
	if !s.SessionPresent() {
		t.Fatal("the session was not kept")
	}
	for n := range 3000 {
		m := receive(t, s)
		if string(m.Payload) != fmt.Sprint(n) || m.Topic != "t/1" || m.Retained {
			t.Fatalf("got %q, want %d", m.Payload, n)
		}
		m.Ack()
	}
}

func TestUnacknowledgedMessagesComeAgain(t *testing.T) {
	b := startBroker(t)
	p := mqtttest.NewProxy(t, b.Addr())
	s := subscribe(t, mqtt.Options{Broker: p.URL(), KeepAlive: 20 * time.Millisecond}, mqtt.Subscription{})
	c := dial(t, mqtt.Options{Broker: b.URL()})
	publishAll(t, c, "t/1", 0, 10)
	for n := range 10 {
		if m := receive(t, s); n < 4 {
			m.Ack()
			m.Ack() // is one PUBACK
		}
	}
	p.Await("4 PUBACKs", func(n mqtttest.Counts) bool { return n.ClientPubacks == 4 })
	pings := p.Counts().Pings
	p.Await("the broker has read them", func(n mqtttest.Counts) bool { return n.Pongs > pings })
	p.Cut()
	awaitLost(t, s.Lost())
	wantErr(t, s.Err(), mqtt.ErrPeerClosed)

	s = subscribe(t, mqtt.Options{Broker: p.URL()}, mqtt.Subscription{Resume: true})
	for n := 4; n < 10; n++ {
		m := receive(t, s)
		if string(m.Payload) != fmt.Sprint(n) || !m.Duplicate {
			t.Fatalf("got %q (duplicate %v), want %d again", m.Payload, m.Duplicate, n)
		}
		m.Ack()
	}
	if n := p.Counts().Subscribes; n != 1 {
		t.Fatalf("%d SUBSCRIBEs, Resume should have avoided the second", n)
	}
	publishAll(t, c, "t/1", 10, 11)
	if m := receive(t, s); string(m.Payload) != "10" || m.Duplicate {
		t.Fatalf("got %q, want 10 for the first time", m.Payload)
	}
	if n := p.Counts().ClientPubacks; n > 10 {
		t.Fatalf("%d PUBACKs for 10 messages", n)
	}
}

func TestAcknowledgementsAreSentBeforeClose(t *testing.T) {
	b := startBroker(t)
	p := mqtttest.NewProxy(t, b.Addr())
	s := subscribe(t, mqtt.Options{Broker: p.URL()}, mqtt.Subscription{})
	publishAll(t, dial(t, mqtt.Options{Broker: b.URL()}), "t/1", 0, 200)
	for range 200 {
		m := receive(t, s)
		m.Ack()
	}
	s.Close()
	p.Await("200 PUBACKs, then a DISCONNECT", func(n mqtttest.Counts) bool { return n.ClientPubacks == 200 && n.Disconnects == 1 })
}

func TestSubscribesAgainOnlyWhenTheSessionIsGoneOrMayHaveChanged(t *testing.T) {
	b := startBroker(t)
	p := mqtttest.NewProxy(t, b.Addr())
	subscribed := func(sub mqtt.Subscription) bool {
		before := p.Counts().Subscribes
		subscribe(t, mqtt.Options{Broker: p.URL()}, sub).Close()
		return p.Counts().Subscribes > before
	}
	if !subscribed(mqtt.Subscription{Resume: true}) {
		t.Error("no SUBSCRIBE although there was no session")
	}
	if subscribed(mqtt.Subscription{Resume: true}) {
		t.Error("SUBSCRIBE although the session was kept")
	}
	if !subscribed(mqtt.Subscription{Filters: []string{"t/#", "new/#"}}) {
		t.Error("no SUBSCRIBE although the filters may have changed")
	}
	s := subscribe(t, mqtt.Options{Broker: p.URL()}, mqtt.Subscription{Resume: true})
	publishAll(t, dial(t, mqtt.Options{Broker: b.URL()}), "new/1", 0, 1)
	receive(t, s)
}

// Whoever keeps it in mind that the session has the filters is told before the broker may make an empty one, and not while
// there is no broker.
func TestConnectingIsCalledBeforeTheConnect(t *testing.T) {
	b := startBroker(t)
	p := mqtttest.NewProxy(t, b.Addr())
	calls, connects := 0, -1
	var fails error
	sub := mqtt.Subscription{Filters: []string{"t/#"}, Connecting: func(context.Context) error {
		calls++
		connects = p.Counts().Connects
		return fails
	}}
	attempt := func() error {
		s, err := mqtt.Subscribe(t.Context(), mqtt.Options{Broker: p.URL(), ClientID: "s"}, sub)
		if err == nil {
			s.Close()
		}
		return err
	}
	if err := attempt(); err != nil || calls != 1 || connects != 0 {
		t.Errorf("%d calls, %d CONNECTs before it, %v", calls, connects, err)
	}
	sub.Resume, fails = true, errors.New("not now")
	wantErr(t, attempt(), fails)
	if n := p.Counts().Connects; calls != 2 || n != 1 {
		t.Errorf("%d calls; %d CONNECTs, one of them refused by the caller", calls, n)
	}
	p.Await("the connection is closed", func(c mqtttest.Counts) bool { return c.Open == 0 })
	p.Refuse(true)
	wantErr(t, attempt(), mqtt.ErrUnreachable)
	if calls != 2 {
		t.Error("called although no connection came about")
	}
}

func TestRefusedSubscriptionIsAnError(t *testing.T) {
	f := mqtttest.NewFake(t)
	for _, code := range []byte{0x80, 0} {
		f.Suback(code)
		_, err := mqtt.Subscribe(context.Background(), mqtt.Options{Broker: f.URL(), ClientID: "s"}, mqtt.Subscription{Filters: []string{"a/#", "b/#"}})
		var refused *mqtt.SubscribeError
		if !errors.As(err, &refused) || refused.Code != code {
			t.Errorf("SUBACK code 0x%02x: %v", code, err)
		}
	}
}

// What was queued comes before the SUBACK. If it is more than the buffer holds, nobody could take it before Subscribe has
// returned, and Subscribe would wait for a SUBACK behind it.
func TestSubscribeReturnsWhenTheBacklogFillsTheBuffer(t *testing.T) {
	b := startBroker(t)
	subscribe(t, mqtt.Options{Broker: b.URL()}, mqtt.Subscription{}).Close()
	publishAll(t, dial(t, mqtt.Options{Broker: b.URL()}), "t/1", 0, 500)
	s := subscribe(t, mqtt.Options{Broker: b.URL(), ConnectTimeout: 20 * time.Second}, mqtt.Subscription{Buffer: 4})
	for n := range 500 {
		m := receive(t, s)
		if string(m.Payload) != fmt.Sprint(n) {
			t.Fatalf("got %q, want %d", m.Payload, n)
		}
		m.Ack()
	}
}

func TestCloseDoesNotHangWhenTheConsumerHasStopped(t *testing.T) {
	for what, end := range map[string]func(*mqtt.Subscriber){"Close": (*mqtt.Subscriber).Close, "Kill": (*mqtt.Subscriber).Kill} {
		t.Run(what, func(t *testing.T) {
			b := startBroker(t)
			s := subscribe(t, mqtt.Options{Broker: b.URL()}, mqtt.Subscription{Buffer: 1})
			publishAll(t, dial(t, mqtt.Options{Broker: b.URL()}), "t/1", 0, 5000)
			m := receive(t, s)
			began := time.Now()
			end(s)
			if took := time.Since(began); took > 20*time.Second {
				t.Fatalf("took %s", took)
			}
			m.Ack() // too late, and harmless
		})
	}
}

func TestSlowConsumerKeepsItsConnection(t *testing.T) {
	b := startBroker(t)
	p := mqtttest.NewProxy(t, b.Addr())
	s := subscribe(t, mqtt.Options{Broker: p.URL(), KeepAlive: 100 * time.Millisecond, PingTimeout: 50 * time.Millisecond}, mqtt.Subscription{Buffer: 1})
	publishAll(t, dial(t, mqtt.Options{Broker: b.URL()}), "t/1", 0, 3000) // far more than buffers hold
	from := p.Counts().Pings
	p.Await("10 pings while the consumer takes nothing", func(n mqtttest.Counts) bool { return n.Pings >= from+10 })
	for n := range 3000 {
		if m := receive(t, s); string(m.Payload) != fmt.Sprint(n) {
			t.Fatalf("got %q, want %d", m.Payload, n)
		}
	}
}

func TestSubscriberNoticesALostBroker(t *testing.T) {
	b := startBroker(t)
	s := subscribe(t, mqtt.Options{Broker: b.URL()}, mqtt.Subscription{})
	b.Down()
	awaitLost(t, s.Lost())
	wantErr(t, s.Err(), mqtt.ErrPeerClosed)
	if err := b.Up(); err != nil {
		t.Fatal(err)
	}
	if s = subscribe(t, mqtt.Options{Broker: b.URL()}, mqtt.Subscription{}); !s.SessionPresent() {
		t.Fatal("the session was not kept")
	}
}

func TestRetainedMessagesAreMarked(t *testing.T) {
	b := startBroker(t)
	if err := outcome(t, dial(t, mqtt.Options{Broker: b.URL()}).Publish("t/state", true, []byte("on"))); err != nil {
		t.Fatal(err)
	}
	s := subscribe(t, mqtt.Options{Broker: b.URL()}, mqtt.Subscription{})
	if m := receive(t, s); !m.Retained || string(m.Payload) != "on" {
		t.Fatalf("got %q, retained %v", m.Payload, m.Retained)
	}
}

// A filter that is dropped brings nothing more, also when the broker has given its packet id to a waiting message.
func TestUnsubscribe(t *testing.T) {
	b := startBroker(t)
	s := subscribe(t, mqtt.Options{Broker: b.URL()}, mqtt.Subscription{Filters: []string{"t/#", "u/#"}})
	c := dial(t, mqtt.Options{Broker: b.URL()})
	publishAll(t, c, "t/1", 0, 100)
	var waiting []mqtt.Message // packet ids 1 to 100
	for range 100 {
		waiting = append(waiting, receive(t, s))
	}
	if err := s.Unsubscribe(t.Context()); err != nil {
		t.Error(err)
	}
	if err := s.Unsubscribe(t.Context(), "u/#", "none"); err != nil {
		t.Fatal(err)
	}
	for _, m := range waiting {
		m.Ack()
	}
	publishAll(t, c, "u/1", 100, 110)
	publishAll(t, c, "t/1", 110, 111)
	if m := receive(t, s); m.Topic != "t/1" {
		t.Errorf("got a message on %s", m.Topic)
	}
	s.Close()
	// The session itself has dropped it.
	publishAll(t, c, "u/1", 111, 112)
	publishAll(t, c, "t/1", 112, 113)
	s = subscribe(t, mqtt.Options{Broker: b.URL()}, mqtt.Subscription{Resume: true})
	for _, want := range []string{"110", "112"} {
		if m := receive(t, s); string(m.Payload) != want {
			t.Errorf("got %s on %s, want %s", m.Payload, m.Topic, want)
		}
	}
}

// The wait for the UNSUBACK ends with the caller's patience, and with the connection.
func TestUnsubscribeWithoutAnswer(t *testing.T) {
	b := startBroker(t)
	p := mqtttest.NewProxy(t, b.Addr())
	s := subscribe(t, mqtt.Options{Broker: p.URL()}, mqtt.Subscription{})
	p.Stall(true)
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	wantErr(t, s.Unsubscribe(ctx, "t/#"), context.DeadlineExceeded)
	ended := make(chan error, 1)
	go func() { ended <- s.Unsubscribe(t.Context(), "t/#") }()
	p.Cut()
	wantErr(t, <-ended, mqtt.ErrPeerClosed)
	wantErr(t, s.Unsubscribe(t.Context(), "t/#"), mqtt.ErrPeerClosed)
}

// Only what is sure may be resumed: here the connection ends before the SUBACK, while Subscribe has returned for the sake
// of what fills the buffer.
func TestSubscriptionIsConfirmed(t *testing.T) {
	b := startBroker(t)
	p := mqtttest.NewProxy(t, b.Addr())
	s := subscribe(t, mqtt.Options{Broker: p.URL()}, mqtt.Subscription{})
	if !s.Confirmed() {
		t.Error("a subscription with its SUBACK is not confirmed")
	}
	s.Close()
	publishAll(t, dial(t, mqtt.Options{Broker: b.URL()}), "t/1", 0, 100)
	s = subscribe(t, mqtt.Options{Broker: p.URL(), KeepAlive: 20 * time.Millisecond}, mqtt.Subscription{Buffer: 4})
	if s.Confirmed() {
		t.Error("confirmed before the SUBACK, which is behind messages that nobody took")
	}
	p.Cut()
	awaitLost(t, s.Lost())
	for len(s.C()) > 0 {
		<-s.C()
	}
	if s.Confirmed() {
		t.Error("confirmed without its SUBACK")
	}
	s = subscribe(t, mqtt.Options{Broker: p.URL()}, mqtt.Subscription{Resume: true})
	if !s.Confirmed() {
		t.Error("a session that was resumed is not confirmed")
	}
}
