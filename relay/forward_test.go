package relay

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"postrider/internal/mqtt"
	"postrider/internal/record"
)

// delivery is one that a test ends.
type delivery struct {
	done chan struct{}
	err  error
}

func (d *delivery) Done() <-chan struct{} { return d.done }
func (d *delivery) Error() error          { return d.err }

// lineConn publishes into a channel.
type lineConn struct {
	Conn
	sent chan *delivery
}

func (c *lineConn) Publish(string, bool, []byte) mqtt.Delivery {
	d := &delivery{done: make(chan struct{})}
	c.sent <- d
	return d
}

// A command counts as sent with its PUBACK, and by nothing else.
func TestSendIsAnsweredByThePuback(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := New(nil, record.Topics{}, nil, Options{AckTimeout: 3 * time.Second})
		s := &session{r: r, conn: &lineConn{sent: make(chan *delivery, 1)}}
		c := s.conn.(*lineConn)
		ctx, cancel := context.WithCancelCause(t.Context())
		send := func() chan error {
			answer := make(chan error, 1)
			go func() { answer <- s.sendOne(ctx, &record.Record{Kind: record.Command}) }()
			return answer
		}
		want := func(answer chan error, want error) {
			t.Helper()
			if err := <-answer; !errors.Is(err, want) {
				t.Errorf("answered %v, want %v", err, want)
			}
		}

		answer := send()
		d := <-c.sent
		synctest.Wait()
		select {
		case err := <-answer:
			t.Errorf("answered %v before the PUBACK", err)
		default:
		}
		close(d.done)
		want(answer, nil)

		answer = send()
		d = <-c.sent
		d.err = mqtt.ErrPeerClosed
		close(d.done)
		want(answer, mqtt.ErrPeerClosed)

		began := time.Now()
		want(send(), mqtt.ErrTimeout)
		if took := time.Since(began); took != 3*time.Second {
			t.Errorf("gave up after %s", took)
		}
		<-c.sent

		// The session ends: the PUBACK may be on its way, and what it answers must not be sent again.
		over := errors.New("the session is over")
		for _, late := range []error{nil, mqtt.ErrPeerClosed} {
			answer = send()
			d = <-c.sent
			cancel(over)
			synctest.Wait()
			d.err = late
			close(d.done)
			want(answer, late)
			ctx, cancel = context.WithCancelCause(t.Context())
		}
		for range 100 { // both at once
			answer = send()
			d = <-c.sent
			synctest.Wait()
			close(d.done)
			cancel(over)
			want(answer, nil)
			ctx, cancel = context.WithCancelCause(t.Context())
		}
		answer = send()
		<-c.sent
		began = time.Now()
		cancel(over)
		want(answer, over)
		if took := time.Since(began); took != time.Second {
			t.Errorf("waited for %s after the end", took)
		}
		want(send(), over)
		if n := len(c.sent); n > 0 {
			t.Errorf("%d were sent after the end", n)
		}
	})
}

// What breaks every connection is not the first thing that is sent on the next one: shipping has its turn.
func TestForwardPausesAfterFailures(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var at []time.Duration
		began, fails := time.Now(), true
		r := New(nil, record.Topics{}, nil, Options{Poll: 100 * time.Millisecond, Forward: func(context.Context, func(context.Context, *record.Record) error) (int, error) {
			at = append(at, time.Since(began))
			if fails {
				return 0, errors.New("broken")
			}
			return 0, nil
		}})
		run := func(d time.Duration) {
			ctx, cancel := context.WithTimeout(t.Context(), d)
			defer cancel()
			if err := (&session{r: r}).forward(ctx); err != nil {
				t.Error(err)
			}
		}
		for range 6000 { // sessions, which end all the time
			run(150 * time.Millisecond)
		}
		if n := len(at); n < 15 || n > 200 {
			t.Errorf("%d calls in a quarter of an hour of failures", n)
		}
		fails = false
		run(time.Minute)
		before := len(at)
		run(10 * time.Second)
		if n := len(at) - before; n < 95 {
			t.Errorf("%d calls in ten seconds without a failure", n)
		}
		before = len(at)
		r.Notify()
		run(10 * time.Millisecond) // no poll comes in this time
		if n := len(at) - before; n != 1 {
			t.Errorf("%d calls for a Notify", n)
		}
	})
}
