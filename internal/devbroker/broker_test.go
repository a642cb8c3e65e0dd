package devbroker_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"go.uber.org/goleak"

	"postrider/internal/devbroker"
	"postrider/internal/mqtt"
	"postrider/internal/mqtttest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func start(t testing.TB) *devbroker.Broker {
	t.Helper()
	b, err := devbroker.Start("", nil)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(b.Close)
	return b
}

func dial(t testing.TB, o mqtt.Options) *mqtt.Client {
	t.Helper()
	c, err := mqtt.Dial(context.Background(), o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(c.Close)
	return c
}

func subscribe(t testing.TB, broker, id string) *mqtt.Subscriber {
	t.Helper()
	s, err := mqtt.Subscribe(context.Background(), mqtt.Options{Broker: broker, ClientID: id, ConnectTimeout: time.Minute}, mqtt.Subscription{Filters: []string{"t/#"}})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(s.Close)
	return s
}

// publish sends the numbers from … to-1 and waits for all PUBACKs.
func publish(t testing.TB, c *mqtt.Client, from, to int) {
	t.Helper()
	if err := publishTo("t/1", c, from, to); err != nil {
		t.Fatal(err)
	}
}

func publishTo(topic string, c *mqtt.Client, from, to int) error {
	var window []mqtt.Delivery
	for n := from; n < to; n++ {
		window = append(window, c.Publish(topic, false, []byte(strconv.Itoa(n))))
		if len(window) == 1024 || n == to-1 {
			for _, d := range window {
				<-d.Done()
				if err := d.Error(); err != nil {
					return err
				}
			}
			window = window[:0]
		}
	}
	return nil
}

func receive(t testing.TB, s *mqtt.Subscriber) mqtt.Message {
	t.Helper()
	select {
	case m := <-s.C():
		return m
	case <-s.Lost():
		t.Fatalf("connection lost: %v", s.Err())
	case <-time.After(20 * time.Second):
		t.Fatal("no message")
	}
	return mqtt.Message{}
}

// expect takes the numbers from … to-1 in order.
func expect(t testing.TB, s *mqtt.Subscriber, from, to int) {
	t.Helper()
	for n := from; n < to; n++ {
		m := receive(t, s)
		if string(m.Payload) != strconv.Itoa(n) {
			t.Fatalf("got %s, want %d", m.Payload, n)
		}
		m.Ack()
	}
}

// By default mochi lost 21,808 of 30,000 and sent the rest in random order.
func TestOfflineSessionGetsEverythingInOrder(t *testing.T) {
	b := start(t)
	subscribe(t, b.URL(), "s").Close()
	c := dial(t, mqtt.Options{Broker: b.URL(), ClientID: "c"})
	publish(t, c, 0, 10_000)
	s := subscribe(t, b.URL(), "s")
	expect(t, s, 0, 5_000)
	s.Close()
	publish(t, c, 10_000, 11_000)
	expect(t, subscribe(t, b.URL(), "s"), 5_000, 11_000)
	if n := b.Dropped(); n != 0 {
		t.Fatalf("%d dropped", n)
	}
}

func TestWhatOnePacketIDSpaceCannotHoldIsDroppedAndCounted(t *testing.T) {
	if testing.Short() {
		t.Skip("65,542 messages")
	}
	var log lockedBuffer
	b, err := devbroker.Start("", slog.New(slog.NewTextHandler(&log, nil)))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(b.Close)
	subscribe(t, b.URL(), "s").Close()
	c := dial(t, mqtt.Options{Broker: b.URL(), ClientID: "c"})
	if err := publishTo("nobody", c, 0, 1000); err != nil { // the 16 bits that mochi sorts by run over in the middle
		t.Fatal(err)
	}
	publish(t, c, 0, 65_535+7)
	mqtttest.Eventually(t, "7 are dropped", func() bool { return b.Dropped() == 7 }) // moments after the last PUBACK
	began := time.Now()
	s := subscribe(t, b.URL(), "s")
	t.Logf("the session was back after %s", time.Since(began))
	expect(t, s, 0, 65_535)
	mqtttest.Eventually(t, "a warning", func() bool { return strings.Contains(log.String(), "dropped acknowledged messages") })
}

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

// Its packet id is that of a waiting message, and mochi would refuse it.
func TestASessionWithWaitingMessagesMaySubscribe(t *testing.T) {
	b := start(t)
	subscribe(t, b.URL(), "s").Close()
	publish(t, dial(t, mqtt.Options{Broker: b.URL(), ClientID: "c"}), 0, 10)
	expect(t, subscribe(t, b.URL(), "s"), 0, 10)
}

func TestReaderThatLagsLosesNothing(t *testing.T) {
	b := start(t)
	s := subscribe(t, b.URL(), "s")
	publish(t, dial(t, mqtt.Options{Broker: b.URL(), ClientID: "c"}), 0, 40_000)
	expect(t, s, 0, 40_000)
}

func TestNothingIsLostWhileASessionComesBack(t *testing.T) {
	b := start(t)
	s := subscribe(t, b.URL(), "s")
	c := dial(t, mqtt.Options{Broker: b.URL(), ClientID: "c"})
	const total = 5_000
	sent := make(chan error, 1)
	go func() { sent <- publishTo("t/1", c, 0, total) }()
	seen := make([]bool, total)
	take := func(m mqtt.Message) {
		n, _ := strconv.Atoi(string(m.Payload))
		seen[n] = true
		m.Ack()
	}
	for running := true; running; {
		for n := 0; n < 500 && running; n++ {
			select {
			case m := <-s.C():
				take(m)
			case err := <-sent:
				if err != nil {
					t.Fatal(err)
				}
				running = false
			}
		}
		if s.Kill(); running { // by turns: gone, and taken over while it is there
			subscribe(t, b.URL(), "s")
			s = subscribe(t, b.URL(), "s")
		}
	}
	s = subscribe(t, b.URL(), "s")
	last := -1
	mqtttest.Eventually(t, "every message was received", func() bool {
		for {
			select {
			case m := <-s.C():
				take(m)
				continue
			default:
			}
			for n := last + 1; n < total; n++ {
				if !seen[n] {
					return false
				}
				last = n
			}
			return true
		}
	})
}

func TestTheOldWillComesBeforeTheNewConnection(t *testing.T) {
	b := start(t)
	s := subscribe(t, b.URL(), "s")
	o := mqtt.Options{Broker: b.URL(), ClientID: "node", Will: &mqtt.Will{Topic: "t/state", Payload: []byte("offline"), Retain: true}}
	for n := range 30 {
		c := dial(t, o)
		d := c.Publish("t/state", true, fmt.Appendf(nil, "online %d", n))
		<-d.Done()
	}
	for n := range 30 {
		for _, want := range []string{"offline", fmt.Sprint("online ", n)} {
			if n == 0 && want == "offline" {
				continue
			}
			if m := receive(t, s); string(m.Payload) != want {
				t.Fatalf("got %q, want %q", m.Payload, want)
			}
		}
	}
}

func TestDownKeepsSessionsAndThePort(t *testing.T) {
	b := start(t)
	addr := b.Addr()
	s := subscribe(t, b.URL(), "s")
	c := dial(t, mqtt.Options{Broker: b.URL(), ClientID: "c"})
	publish(t, c, 0, 10)
	expect(t, s, 0, 5)
	s.Close()
	b.Down()
	select {
	case <-c.Lost():
	case <-time.After(20 * time.Second):
		t.Fatal("still connected")
	}
	if _, err := mqtt.Dial(context.Background(), mqtt.Options{Broker: b.URL(), ClientID: "c"}); !errors.Is(err, syscall.ECONNREFUSED) {
		t.Fatalf("dialing a broker that is down: %v", err)
	}
	if err := b.Up(); err != nil {
		t.Fatal(err)
	}
	if err := b.Up(); err != nil || b.Addr() != addr {
		t.Fatalf("second Up: %v; %s, was %s", err, b.Addr(), addr)
	}
	s = subscribe(t, b.URL(), "s")
	if !s.SessionPresent() {
		t.Fatal("the session is gone")
	}
	expect(t, s, 5, 10)
}

// mochi's own Close races and panics while clients dial.
func TestGoingDownWhileClientsComeAndGo(t *testing.T) {
	b := start(t)
	ctx, stop := context.WithCancel(context.Background())
	var clients sync.WaitGroup
	for n := range 4 {
		clients.Go(func() {
			o := mqtt.Options{Broker: b.URL(), ClientID: strconv.Itoa(n / 2), ConnectTimeout: time.Second} // pairs take each other over
			for ctx.Err() == nil {
				if n < 2 {
					if c, err := mqtt.Dial(ctx, o); err == nil {
						for c.Err() == nil && ctx.Err() == nil {
							<-c.Publish("t/1", false, []byte("0")).Done()
						}
						c.Close()
					}
				} else if s, err := mqtt.Subscribe(ctx, o, mqtt.Subscription{Filters: []string{"t/#"}}); err == nil {
					for s.Err() == nil && ctx.Err() == nil {
						select {
						case m := <-s.C():
							m.Ack()
						case <-s.Lost():
						case <-ctx.Done():
						}
					}
					s.Kill()
				}
			}
		})
	}
	for range 25 {
		b.Down()
		if err := b.Up(); err != nil {
			t.Fatal(err)
		}
		func() { // somebody was served
			c := dial(t, mqtt.Options{Broker: b.URL(), ClientID: "witness"})
			defer c.Close()
			publish(t, c, 0, 20)
		}()
	}
	b.Close() // while they still dial
	stop()
	clients.Wait()
	b.Close()
	if err := b.Up(); err == nil {
		t.Fatal("Up after Close")
	}
}

func TestAReaderThatIsStuckHoldsUpNobody(t *testing.T) {
	b := start(t)
	p := mqtttest.NewProxy(t, b.Addr())
	subscribe(t, p.URL(), "s")
	p.Stall(true)
	c := dial(t, mqtt.Options{Broker: b.URL(), ClientID: "c"})
	began := time.Now()
	for range 200 {
		<-c.Publish("t/1", false, make([]byte, 64<<10)).Done()
	}
	if took := time.Since(began); took > 20*time.Second { // its own limit is 30 s
		t.Fatalf("it holds up who publishes: %s", took)
	}
	began = time.Now()
	b.Close()
	if took := time.Since(began); took > 20*time.Second {
		t.Fatalf("took %s", took)
	}
}

func TestAPortThatIsTakenIsAClearError(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	_, err = devbroker.Start(l.Addr().String(), nil)
	if !errors.Is(err, syscall.EADDRINUSE) || !strings.Contains(err.Error(), l.Addr().String()+" is taken by another program") {
		t.Fatalf("%v", err)
	}
	if _, err := devbroker.Start("nonsense", nil); err == nil {
		t.Fatal("no error for an address without a port")
	}
}

func TestListensOnLoopbackUnlessToldOtherwise(t *testing.T) {
	b, err := devbroker.Start(":0", nil)
	if err != nil {
		t.Fatal(err)
	}
	defer b.Close()
	if !strings.HasPrefix(b.Addr(), "127.0.0.1:") {
		t.Fatal(b.Addr())
	}
}
