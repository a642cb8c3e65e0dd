package mqtt_test

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	"go.uber.org/goleak"

	"postrider/internal/devbroker"
	"postrider/internal/mqtt"
)

// Every test leaves nothing running: not after a loss, a failed Dial, a Close or a Kill.
func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func startBroker(t testing.TB) *devbroker.Broker {
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
	if o.ClientID == "" {
		o.ClientID = "publisher"
	}
	c, err := mqtt.Dial(context.Background(), o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(c.Close)
	return c
}

func subscribe(t testing.TB, o mqtt.Options, sub mqtt.Subscription) *mqtt.Subscriber {
	t.Helper()
	if o.ClientID == "" {
		o.ClientID = "subscriber"
	}
	if sub.Filters == nil {
		sub.Filters = []string{"t/#"}
	}
	s, err := mqtt.Subscribe(context.Background(), o, sub)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(s.Close)
	return s
}

// outcome waits for the end of a delivery.
func outcome(t testing.TB, d mqtt.Delivery) error {
	t.Helper()
	select {
	case <-d.Done():
		return d.Error()
	case <-time.After(20 * time.Second):
		t.Fatal("delivery without an end")
		return nil
	}
}

func publishAll(t testing.TB, c *mqtt.Client, topic string, from, to int) {
	t.Helper()
	var all []mqtt.Delivery
	for n := from; n < to; n++ {
		all = append(all, c.Publish(topic, false, fmt.Append(nil, n)))
	}
	for _, d := range all {
		if err := outcome(t, d); err != nil {
			t.Fatal(err)
		}
	}
}

// receive takes the next message, which must come.
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

func awaitLost(t testing.TB, lost <-chan struct{}) {
	t.Helper()
	select {
	case <-lost:
	case <-time.After(20 * time.Second):
		t.Fatal("still connected")
	}
}

func wantErr(t testing.TB, err, want error) {
	t.Helper()
	if !errors.Is(err, want) {
		t.Fatalf("error %v, want %v", err, want)
	}
}
