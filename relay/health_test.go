package relay

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"postrider/internal/mqtt"
	"postrider/internal/record"
	"postrider/outbox"
)

// What is said follows what sessions achieve, from the start to the return of a broker that was away.
func TestHealthFollowsWhatSessionsAchieve(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := New(nil, record.Topics{}, func(context.Context) (Conn, error) { return nil, errors.New("unused") }, Options{})
		says := func(when, want string) {
			t.Helper()
			trouble, err := r.Health()
			if err != nil || !strings.HasPrefix(trouble, want) || (want == "") != (trouble == "") {
				t.Errorf("%s: %q, %v, not %q", when, trouble, err, want)
			}
		}
		stuck := func(when, want string) {
			t.Helper()
			if _, err := r.Health(); err == nil || err.Error() != want {
				t.Errorf("%s: %v, not %q", when, err, want)
			}
		}
		flying := []int64{1}
		stuck("before Run", "the relay did not start yet")
		r.c.turned.set()
		says("the first session begins", "not connected yet")
		s := &session{}
		r.c.connected(s)
		says("connected", "")
		s.bytes.Store(100)
		says("records in flight, and nothing went wrong before", "")

		r.c.ended(ended{err: errors.New("closed\nstack"), inFlight: flying}, false, 10*time.Second)
		says("ended", "nothing is shipped since 2000-01-01T00:00:00Z: closed; next try 2000-01-01T00:00:10Z")
		<-time.After(20 * time.Second) // of the bubble
		r.c.ended(ended{err: errors.New("refused")}, false, 10*time.Second)
		says("ended again", "nothing is shipped since 2000-01-01T00:00:00Z: refused; next try 2000-01-01T00:00:30Z")

		s = &session{}
		r.c.connected(s)
		says("connected again, nothing to ship", "")
		s.bytes.Store(100)
		says("no PUBACK comes", "nothing is shipped since 2000-01-01T00:00:00Z: refused; connected again, no PUBACK came yet")
		s.acked.Store(true)
		says("a PUBACK came", "")
		r.c.ended(ended{err: errors.New("closed"), connected: true, progress: true, inFlight: flying}, false, time.Second)
		says("ended after progress", "nothing is shipped since 2000-01-01T00:00:20Z: closed; next try 2000-01-01T00:00:21Z")

		r.c.connected(&session{})
		<-time.After(5 * time.Second) // of the bubble
		r.c.ended(ended{err: errors.New("closed"), connected: true, inFlight: flying}, false, time.Second)
		says("ended with records in flight, and no PUBACK", "nothing is shipped since 2000-01-01T00:00:20Z: closed")
		r.c.ended(ended{err: errors.New("closed"), connected: true}, false, time.Second)
		says("ended, and there was nothing to ship", "nothing is shipped since 2000-01-01T00:00:25Z: closed")
		r.c.ended(ended{err: errors.New("disk is full")}, true, time.Second)
		stuck("no broker is to blame", "nothing is shipped since 2000-01-01T00:00:25Z: disk is full")
		r.c.connected(&session{})
		says("it goes on", "")
		r.c.ended(ended{err: errors.New("closed")}, false, time.Second)

		<-time.After(stuckAfter - 25*time.Second) // of the bubble
		says("at the limit", "nothing is shipped")
		<-time.After(time.Second) // of the bubble
		stuck("no turn for too long", "the relay did nothing for 1m1s")
		r.c.turned.set()
		says("it turns again", "nothing is shipped")
	})
}

// Whatever a broker or another relay does is no fault of this one.
func TestReasonsThatAreOnesOwn(t *testing.T) {
	for _, c := range []struct {
		err  error
		want string
	}{
		{&mqtt.RefusedError{Code: 5}, "refused"}, {mqtt.ErrUnreachable, "unreachable"}, {mqtt.ErrTimeout, "timeout"},
		{mqtt.ErrPeerClosed, "closed"}, {mqtt.ErrProtocol, "protocol"}, {outbox.ErrLocked, "locked"}, {outbox.ErrFenced, "fenced"},
		{errPanic, "panic"}, {errors.New("disk is full"), "other"},
	} {
		if got := reasonOf(fmt.Errorf("session: %w", c.err)); got != c.want {
			t.Errorf("%v: %s, not %s", c.err, got, c.want)
		}
	}
}
