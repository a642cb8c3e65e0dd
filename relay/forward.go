package relay

import (
	"context"
	"fmt"
	"time"

	"postrider/internal/mqtt"
	"postrider/internal/record"
)

// Forward calls send for each input that is due and leaves the node by a route without an outbox behind it, and says how
// many send took. send returns nil only after the PUBACK on the session's connection; it must not be called after Forward
// has returned. The end of ctx is the session's.
type Forward func(ctx context.Context, send func(ctx context.Context, r *record.Record) error) (n int, err error)

// forwards is what outlives a session of its attempts to forward.
type forwards struct {
	bell     chan struct{}
	failures int       // in a row
	next     time.Time // not before
}

// forward calls Forward with every Notify and poll until ctx ends. Whatever becomes of that, an error or a panic, the session
// goes on shipping; and what broke a connection is not sent again on the next one before shipping had its turn.
func (s *session) forward(ctx context.Context) error {
	f := &s.r.forwards
	poll := time.NewTicker(s.r.o.Poll)
	defer poll.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-f.bell:
		case <-poll.C:
		}
		if time.Now().Before(f.next) {
			continue
		}
		sent, taken := 0, 0
		err := guard(func() error {
			_, err := s.r.o.Forward(ctx, func(ctx context.Context, r *record.Record) error {
				sent++
				err := s.sendOne(ctx, r)
				if err == nil {
					taken++
				}
				return err
			})
			return err
		})()
		switch {
		case err == nil, ctx.Err() != nil && taken == sent:
			f.failures = 0
			continue
		case taken > 0:
			f.failures = 0
		}
		f.next = time.Now().Add(backoff(s.r.o.BackoffMin, s.r.o.BackoffMax, f.failures))
		f.failures++
		if ctx.Err() == nil && s.r.said.due("forward") {
			s.r.log.Warn("inputs of a best-effort route are not forwarded; they wait", "err", err)
		}
	}
}

// sendOne publishes a command and waits for its PUBACK, as long as for that of any record; at the end of ctx for the grace
// period. A PUBACK that came is never called an error: the command would be sent again.
func (s *session) sendOne(ctx context.Context, r *record.Record) error {
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	d := s.conn.Publish(s.r.topics.Of(r), false, r.AppendCloudEvent(make([]byte, 0, len(r.Data)+768)))
	limit := time.NewTimer(s.r.patience)
	defer limit.Stop()
	err := error(nil)
	select {
	case <-d.Done():
	case <-limit.C:
		err = fmt.Errorf("%w: no PUBACK for %s", mqtt.ErrTimeout, s.r.patience)
	case <-ctx.Done():
		grace := time.NewTimer(s.r.o.Grace)
		defer grace.Stop()
		select {
		case <-d.Done():
		case <-grace.C:
			err = context.Cause(ctx)
		}
	}
	select {
	case <-d.Done():
		return d.Error()
	default:
		return err
	}
}
