package fold

import (
	"errors"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"postrider/internal/mqtt"
	"postrider/internal/mqtttest"
)

func TestHealthOfASubscriber(t *testing.T) {
	b := startBroker(t)
	f := openNew(t, Options{})
	o := broker(b.URL())
	o.MinBackoff, o.MaxBackoff = time.Millisecond, 20*time.Millisecond
	s, err := NewSubscriber(f, o)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := s.Health(); err == nil {
		t.Error("it did not start yet")
	}
	runSubscriber(t, s)
	says := func(what string, ok func(trouble string) bool) {
		t.Helper()
		mqtttest.Eventually(t, what, func() bool {
			trouble, err := s.Health()
			return err == nil && ok(trouble)
		})
	}
	fine := func(trouble string) bool { return trouble == "" }
	says("subscribed", fine)
	before := s.c.turned.Load()
	mqtttest.Eventually(t, "an idle subscriber turns", func() bool { return s.c.turned.Load() != before })
	b.Down()
	says("not subscribed", func(trouble string) bool {
		return strings.HasPrefix(trouble, "not subscribed since 20") && strings.Contains(trouble, "; next try 20") && !strings.Contains(trouble, "\n")
	})
	if err := b.Up(); err != nil {
		t.Fatal(err)
	}
	says("subscribed again", fine)
	if err := f.Health(t.Context()); err != nil {
		t.Errorf("the fold's database: %v", err)
	}
}

func TestHealthTellsAStandstillFromABrokerThatIsAway(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var s Subscriber
		s.c.turn()
		if trouble, err := s.Health(); err != nil || trouble != "not subscribed yet" {
			t.Errorf("%q, %v", trouble, err)
		}
		for range 3 {
			<-time.After(30 * time.Second) // of the bubble
			s.c.turn()
			s.c.ended(mqtt.ErrUnreachable, false, 30*time.Second)
		}
		want := "not subscribed since 2000-01-01T00:00:30Z: broker unreachable; next try 2000-01-01T00:02:00Z"
		if trouble, err := s.Health(); err != nil || trouble != want {
			t.Errorf("%q, %v", trouble, err)
		}
		s.c.connected()
		<-time.After(stuckAfter) // of the bubble
		if trouble, err := s.Health(); err != nil || trouble != "" {
			t.Errorf("%q, %v", trouble, err)
		}
		s.c.ended(errors.New("later"), false, 0)
		if trouble, _ := s.Health(); !strings.HasPrefix(trouble, "not subscribed since 2000-01-01T00:02:30Z: later") {
			t.Errorf("%q", trouble)
		}
		<-time.After(time.Second) // of the bubble
		if _, err := s.Health(); err == nil || err.Error() != "the fold did nothing for 1m1s" {
			t.Errorf("%v", err)
		}
	})
}
