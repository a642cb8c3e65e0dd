package mqtt_test

import (
	"context"
	"errors"
	"fmt"
	"net"
	"strings"
	"syscall"
	"testing"
	"time"

	"postrider/internal/mqtt"
	"postrider/internal/mqtttest"
)

func TestDeliveryNeedsPuback(t *testing.T) {
	p := mqtttest.NewProxy(t, startBroker(t).Addr())
	c := dial(t, mqtt.Options{Broker: p.URL()})
	if err := outcome(t, c.Publish("t/1", false, []byte("acknowledged"))); err != nil {
		t.Fatal(err)
	}
	p.DropPubacks(-1)
	var pending []mqtt.Delivery
	for range 100 {
		pending = append(pending, c.Publish("t/1", false, []byte("PUBACK dropped")))
	}
	p.Await("100 PUBACKs dropped", func(n mqtttest.Counts) bool { return n.DroppedPubacks == 100 })
	for _, d := range pending {
		wantErr(t, d.Error(), mqtt.ErrInFlight)
	}
	p.Cut()
	for _, d := range pending {
		wantErr(t, outcome(t, d), mqtt.ErrPeerClosed)
	}
	awaitLost(t, c.Lost())
	wantErr(t, c.Err(), mqtt.ErrPeerClosed)
}

func TestOnlyThePubackOfItsOwnMessageCompletesADelivery(t *testing.T) {
	p := mqtttest.NewProxy(t, startBroker(t).Addr())
	c := dial(t, mqtt.Options{Broker: p.URL()})
	p.DropPubacks(1)
	first, second := c.Publish("t/1", false, nil), c.Publish("t/1", false, nil)
	if err := outcome(t, second); err != nil {
		t.Fatal(err)
	}
	wantErr(t, first.Error(), mqtt.ErrInFlight)
	c.Kill()
	wantErr(t, outcome(t, first), mqtt.ErrClosed)
}

func TestCloseFailsWhatIsInFlight(t *testing.T) {
	p := mqtttest.NewProxy(t, startBroker(t).Addr())
	c := dial(t, mqtt.Options{Broker: p.URL()})
	p.DropPubacks(-1)
	d := c.Publish("t/1", false, nil)
	c.Close()
	wantErr(t, outcome(t, d), mqtt.ErrClosed)
	wantErr(t, outcome(t, c.Publish("t/1", false, nil)), mqtt.ErrClosed)
	wantErr(t, c.Err(), mqtt.ErrClosed)
	c.Close()
	c.Kill()
}

func TestPublishAfterTheLossFailsAtOnce(t *testing.T) {
	p := mqtttest.NewProxy(t, startBroker(t).Addr())
	c := dial(t, mqtt.Options{Broker: p.URL()})
	p.Cut()
	awaitLost(t, c.Lost())
	d := c.Publish("t/1", false, nil)
	select {
	case <-d.Done():
		wantErr(t, d.Error(), mqtt.ErrPeerClosed)
	default:
		t.Fatal("a delivery that is still to end")
	}
}

func TestTooManyInFlight(t *testing.T) {
	f := mqtttest.NewFake(t)
	f.OnPublish(func(mqtttest.FakePublish) mqtttest.Answer { return mqtttest.Ignore })
	c := dial(t, mqtt.Options{Broker: f.URL()})
	var last mqtt.Delivery
	for range 65535 {
		last = c.Publish("t", false, nil)
	}
	wantErr(t, last.Error(), mqtt.ErrInFlight)
	wantErr(t, outcome(t, c.Publish("t", false, nil)), mqtt.ErrNoPacketID)
	select {
	case <-c.Lost():
		t.Fatalf("lost: %v", c.Err())
	default:
	}
}

func TestSilentBrokerIsNoticedWithinConnectTimeout(t *testing.T) {
	addr := mqtttest.Silent(t)
	for _, scheme := range []string{"tcp", "tls", "ws", "wss"} {
		t.Run(scheme, func(t *testing.T) {
			began := time.Now()
			_, err := mqtt.Dial(context.Background(), mqtt.Options{Broker: scheme + "://" + addr, ClientID: "c", ConnectTimeout: 150 * time.Millisecond})
			wantErr(t, err, mqtt.ErrTimeout)
			if took := time.Since(began); took > 2*time.Second {
				t.Fatalf("took %s", took)
			}
		})
	}
}

func TestDialEndsWithItsContext(t *testing.T) {
	addr := mqtttest.Silent(t)
	for _, scheme := range []string{"tcp", "tls", "ws", "wss"} {
		t.Run(scheme, func(t *testing.T) {
			ctx, cancel := context.WithCancelCause(context.Background())
			why := errors.New("the operator pressed ^C")
			time.AfterFunc(50*time.Millisecond, func() { cancel(why) })
			began := time.Now()
			_, err := mqtt.Dial(ctx, mqtt.Options{Broker: scheme + "://" + addr, ClientID: "c", ConnectTimeout: time.Minute})
			wantErr(t, err, why)
			if took := time.Since(began); took > 20*time.Second {
				t.Fatalf("took %s", took)
			}
		})
	}
}

func TestDialTellsRefusalsApart(t *testing.T) {
	f := mqtttest.NewFake(t)
	for _, code := range []int{1, 2, 3, 4, 5, 7, 0x87} { // the last two are no codes of MQTT 3.1.1; paho takes them for success
		tried := 0
		f.OnConnect(func(int) int { tried++; return code })
		_, err := mqtt.Dial(context.Background(), mqtt.Options{Broker: f.URL(), ClientID: "c"})
		var refused *mqtt.RefusedError
		if !errors.As(err, &refused) || int(refused.Code) != code {
			t.Errorf("CONNACK code %d: %v", code, err)
		}
		if tried != 1 { // a broker may lock a client out that tries a wrong password twice
			t.Errorf("CONNACK code %d: tried %d times", code, tried)
		}
	}
	f.Refuse(true)
	_, err := mqtt.Dial(context.Background(), mqtt.Options{Broker: f.URL(), ClientID: "c"})
	wantErr(t, err, mqtt.ErrUnreachable)
	wantErr(t, err, syscall.ECONNREFUSED)
}

func TestDialNoticesAPeerThatHangsUp(t *testing.T) {
	p := mqtttest.NewProxy(t, mqtttest.NewFake(t).Addr())
	p.SetTarget(freePort(t)) // accepts, and hangs up since it reaches nobody
	_, err := mqtt.Dial(context.Background(), mqtt.Options{Broker: p.URL(), ClientID: "c"})
	wantErr(t, err, mqtt.ErrPeerClosed)
}

func freePort(t testing.TB) string {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	return l.Addr().String()
}

func TestErrTellsAPeerThatClosesFromATimeout(t *testing.T) {
	f := mqtttest.NewFake(t)
	f.OnPublish(func(mqtttest.FakePublish) mqtttest.Answer { return mqtttest.Close })
	c := dial(t, mqtt.Options{Broker: f.URL()})
	wantErr(t, outcome(t, c.Publish("t", false, nil)), mqtt.ErrPeerClosed)
	wantErr(t, c.Err(), mqtt.ErrPeerClosed)

	f.Deaf(true)
	c = dial(t, mqtt.Options{Broker: f.URL(), KeepAlive: 50 * time.Millisecond, PingTimeout: 100 * time.Millisecond})
	awaitLost(t, c.Lost())
	wantErr(t, c.Err(), mqtt.ErrTimeout)
	if errors.Is(c.Err(), mqtt.ErrPeerClosed) {
		t.Fatalf("a timeout must not look like the peer's doing: %v", c.Err())
	}
}

func TestNonsenseFromTheBrokerEndsTheConnection(t *testing.T) {
	f := mqtttest.NewFake(t)
	f.OnPublish(func(mqtttest.FakePublish) mqtttest.Answer { return mqtttest.Ignore })
	c := dial(t, mqtt.Options{Broker: f.URL()})
	d := c.Publish("t", false, nil)
	f.Send(1, 0x00, 0x00) // no such packet
	err := outcome(t, d)
	if err == nil || errors.Is(err, mqtt.ErrPeerClosed) || errors.Is(err, mqtt.ErrTimeout) || !strings.Contains(err.Error(), "broken MQTT stream") {
		t.Fatalf("error %v", err)
	}
	awaitLost(t, c.Lost())
}

func TestIdleStalledPeerIsNoticedByPing(t *testing.T) {
	p := mqtttest.NewProxy(t, startBroker(t).Addr())
	c := dial(t, mqtt.Options{Broker: p.URL(), KeepAlive: 100 * time.Millisecond, PingTimeout: 200 * time.Millisecond})
	p.Await("pings are answered for a while", func(n mqtttest.Counts) bool { return n.Pings >= 5 })
	if err := c.Err(); err != nil {
		t.Fatal(err)
	}
	p.Stall(true)
	awaitLost(t, c.Lost())
	wantErr(t, c.Err(), mqtt.ErrTimeout)
}

func TestStalledPeerIsNoticedByWrite(t *testing.T) {
	p := mqtttest.NewProxy(t, startBroker(t).Addr())
	c := dial(t, mqtt.Options{Broker: p.URL(), WriteTimeout: 400 * time.Millisecond})
	p.Stall(true)
	began := time.Now()
	var d mqtt.Delivery
	for d = c.Publish("t", false, make([]byte, 64<<10)); c.Err() == nil; d = c.Publish("t", false, make([]byte, 64<<10)) {
	}
	wantErr(t, outcome(t, d), mqtt.ErrTimeout)
	if took := time.Since(began); took > 5*time.Second {
		t.Fatalf("noticed after %s", took)
	}
}

// The link moves all the time, but each message takes longer than any time limit, and so does what is queued before a ping.
func TestSlowLinkDoesNotTrip(t *testing.T) {
	p := mqtttest.NewProxy(t, startBroker(t).Addr())
	c := dial(t, mqtt.Options{Broker: p.URL(), KeepAlive: 100 * time.Millisecond, PingTimeout: 100 * time.Millisecond, WriteTimeout: 400 * time.Millisecond})
	p.Throttle(400 << 10)
	var all []mqtt.Delivery
	for range 6 {
		all = append(all, c.Publish("t", false, make([]byte, 200<<10)))
	}
	for _, d := range all {
		if err := outcome(t, d); err != nil {
			t.Fatal(err)
		}
	}
	if p.Counts().Pings == 0 {
		t.Fatal("no ping: the test shows nothing about them")
	}
}

func TestCloseWithholdsTheWillAndKillDoesNot(t *testing.T) {
	b := startBroker(t)
	s := subscribe(t, mqtt.Options{Broker: b.URL()}, mqtt.Subscription{})
	o := mqtt.Options{Broker: b.URL(), ClientID: "mortal", Will: &mqtt.Will{Topic: "t/will", Payload: []byte("gone"), Retain: true}}

	dial(t, o).Close()
	publishAll(t, dial(t, mqtt.Options{Broker: b.URL()}), "t/after-close", 0, 1)
	if m := receive(t, s); m.Topic != "t/after-close" {
		t.Fatalf("got %q after Close", m.Topic)
	}
	dial(t, o).Kill()
	if m := receive(t, s); m.Topic != "t/will" || string(m.Payload) != "gone" {
		t.Fatalf("got %q after Kill", m.Topic)
	}
}

func TestCloseSendsWhatWasPublished(t *testing.T) {
	b := startBroker(t)
	p := mqtttest.NewProxy(t, b.Addr())
	s := subscribe(t, mqtt.Options{Broker: b.URL()}, mqtt.Subscription{})
	c := dial(t, mqtt.Options{Broker: p.URL()})
	for n := range 500 {
		c.Publish("t/1", false, fmt.Append(nil, n))
	}
	c.Close()
	for n := range 500 {
		if m := receive(t, s); string(m.Payload) != fmt.Sprint(n) {
			t.Fatalf("got %s, want %d", m.Payload, n)
		}
	}
	p.Await("a DISCONNECT", func(n mqtttest.Counts) bool { return n.Disconnects == 1 })
}

func TestCloseIsBoundedOnAStalledLink(t *testing.T) {
	p := mqtttest.NewProxy(t, startBroker(t).Addr())
	c := dial(t, mqtt.Options{Broker: p.URL(), WriteTimeout: time.Minute})
	p.Stall(true)
	stuck := make(chan struct{})
	go func() {
		defer close(stuck)
		for c.Err() == nil {
			c.Publish("t", false, make([]byte, 256<<10))
		}
	}()
	<-time.After(300 * time.Millisecond) // until the kernel's buffers are full; were they not, the test were only weaker
	began := time.Now()
	c.Close()
	if took := time.Since(began); took > 20*time.Second {
		t.Fatalf("Close took %s", took)
	}
	<-stuck
}

func TestPublishRefusesWhatPahoWouldMangle(t *testing.T) {
	c := dial(t, mqtt.Options{Broker: startBroker(t).URL()})
	for _, topic := range []string{"", strings.Repeat("x", 65536)} {
		if err := outcome(t, c.Publish(topic, false, nil)); err == nil {
			t.Errorf("a topic of %d bytes is published", len(topic))
		}
	}
	if err := outcome(t, c.Publish(strings.Repeat("x", 65535), false, nil)); err != nil {
		t.Error(err)
	}
}

func TestSecondConnectionWithTheSameIDCutsTheFirst(t *testing.T) {
	b := startBroker(t)
	first, second := dial(t, mqtt.Options{Broker: b.URL()}), dial(t, mqtt.Options{Broker: b.URL()})
	awaitLost(t, first.Lost())
	wantErr(t, first.Err(), mqtt.ErrPeerClosed)
	publishAll(t, second, "t/1", 0, 1)
}
