package fold

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"runtime/debug"
	"time"

	"postrider/internal/mqtt"
	"postrider/internal/record"
)

const (
	maxBatch      = 1024
	maxBatchBytes = 8 << 20 // of payloads: a batch of the largest records must not take all memory
)

// SubscriberOptions of NewSubscriber. Only Broker is required.
type SubscriberOptions struct {
	Broker     mqtt.Options // the client id is the fold's own
	Topics     record.Topics
	Partitions []int        // nil: all
	Tenant     string       // "": all
	Logger     *slog.Logger // nil: the fold's
	// The pause between sessions is random between 0 and a limit that doubles from MinBackoff to MaxBackoff and starts anew
	// after progress. 0: 0.2 s and 30 s.
	MinBackoff, MaxBackoff time.Duration
}

// Subscriber carries events from a broker into a Fold.
type Subscriber struct {
	fold *Fold
	o    SubscriberOptions
	log  *slog.Logger
	sub  mqtt.Subscription
	c    condition
}

// NewSubscriber checks and stores; Run does the work.
func NewSubscriber(f *Fold, o SubscriberOptions) (*Subscriber, error) {
	if o.Tenant != "" {
		if err := record.CheckName(o.Tenant); err != nil {
			return nil, fmt.Errorf("fold subscriber: tenant %w", err)
		}
	}
	if o.Topics.Root != "" {
		if err := record.CheckRoot(o.Topics.Root); err != nil {
			return nil, fmt.Errorf("fold subscriber: root %w", err)
		}
	}
	if o.Partitions == nil {
		for p := range record.Partitions {
			o.Partitions = append(o.Partitions, p)
		}
	}
	if len(o.Partitions) == 0 {
		return nil, errors.New("fold subscriber: no partition")
	}
	for _, p := range o.Partitions {
		if p < 0 || p >= record.Partitions {
			return nil, fmt.Errorf("fold subscriber: partition %d is not in 0-%d", p, record.Partitions-1)
		}
	}
	if o.MinBackoff == 0 {
		o.MinBackoff = 200 * time.Millisecond
	}
	if o.MaxBackoff == 0 {
		o.MaxBackoff = 30 * time.Second
	}
	log := f.log
	if o.Logger != nil {
		log = o.Logger.With("component", "fold")
	}
	o.Broker.ClientID = f.clientID
	return &Subscriber{
		fold: f, o: o, log: log,
		sub: mqtt.Subscription{Filters: o.Topics.EventsFilters(o.Tenant, o.Partitions), Buffer: 2 * maxBatch},
	}, nil
}

// Announce has a broker that does not know this fold keep a session for it, and returns: what is published before the first
// subscription reaches nobody. Run must not be running.
func (s *Subscriber) Announce(ctx context.Context) error {
	conn, err := mqtt.Subscribe(ctx, s.o.Broker, s.sub)
	if err != nil {
		return err
	}
	conn.Close()
	return nil
}

// Run keeps one session at a time until ctx ends, whatever goes wrong in it, and returns nil then. It must run only once
// at a time.
func (s *Subscriber) Run(ctx context.Context) error {
	backoff := backoff{min: s.o.MinBackoff, max: s.o.MaxBackoff}
	var quiet quiet
	for {
		s.c.turn()
		progress, err := s.guarded(ctx)
		if ctx.Err() != nil {
			return nil
		}
		if progress {
			backoff.reset()
			quiet.reset()
		}
		pause := backoff.next()
		s.c.ended(err, progress, pause)
		level := slog.LevelWarn // brokers come back
		if f := (*fault)(nil); errors.As(err, &f) {
			level = slog.LevelError
		}
		if quiet.allow(time.Now()) {
			s.log.Log(ctx, level, "session ended; a new one follows", "err", err, "next_in", pause.Round(time.Millisecond))
		}
		wait := time.NewTimer(pause)
		select {
		case <-wait.C:
		case <-ctx.Done():
			wait.Stop()
			return nil
		}
	}
}

// backoff gives pauses with full jitter.
type backoff struct{ min, max, limit time.Duration }

func (b *backoff) next() time.Duration {
	b.limit = min(max(2*b.limit, b.min), b.max)
	return rand.N(b.limit)
}

func (b *backoff) reset() { b.limit = 0 }

// fault is an error that needs a person: a panic, or a database that does not take what came.
type fault struct{ err error }

func (f *fault) Error() string { return f.err.Error() }
func (f *fault) Unwrap() error { return f.err }

// guarded turns a panic into the session's error: one bug must not end the fold.
func (s *Subscriber) guarded(ctx context.Context) (progress bool, err error) {
	defer func() {
		if p := recover(); p != nil {
			err = &fault{fmt.Errorf("panic: %v\n%s", p, debug.Stack())}
		}
	}()
	err = s.session(ctx, &progress)
	return progress, err
}

// session takes in what comes on one connection. It acknowledges nothing that is not committed: an error leaves all of
// the batch to be delivered again on the next connection.
func (s *Subscriber) session(ctx context.Context, progress *bool) error {
	conn, err := mqtt.Subscribe(ctx, s.o.Broker, s.sub)
	if err != nil {
		// The broker may have lost its session and made an empty one meanwhile. Events are not retained: nothing comes again
		// because of a subscription.
		s.sub.Resume = false
		return err
	}
	defer conn.Close()
	// Without the SUBACK nobody knows what the session has, and the next connection subscribes again.
	defer func() { s.sub.Resume = conn.Confirmed() }()
	s.fold.metrics.connected.Set(1)
	defer s.fold.metrics.connected.Set(0)
	s.log.Info("subscribed", "client_id", s.fold.clientID, "session_kept", conn.SessionPresent())
	s.c.connected()
	turn := time.NewTicker(time.Second)
	defer turn.Stop()
	b := inbound{topics: s.o.Topics}
	for {
		select {
		case <-turn.C:
			s.c.turn()
			continue
		case m := <-conn.C():
			b.start(m)
		case <-conn.Lost():
			return conn.Err()
		case <-ctx.Done():
			return context.Cause(ctx)
		}
		b.fill(conn.C())
		if _, err := s.fold.Apply(ctx, b.arrived); err != nil {
			return &fault{err}
		}
		for _, ack := range b.acks {
			ack()
		}
		*progress = true
	}
}

// inbound is a batch and the acknowledgements it owes.
type inbound struct {
	topics  record.Topics
	arrived []Arrived
	acks    []func()
	bytes   int
}

func (b *inbound) start(m mqtt.Message) {
	clear(b.arrived) // lets go of the payloads
	clear(b.acks)
	b.arrived, b.acks, b.bytes = b.arrived[:0], b.acks[:0], 0
	b.add(m)
}

func (b *inbound) add(m mqtt.Message) {
	b.arrived = append(b.arrived, Arrive(b.topics, m.Topic, m.Payload))
	b.acks = append(b.acks, m.Ack)
	b.bytes += len(m.Payload)
}

// fill takes what has come meanwhile and waits for nothing: the commit of one batch is the time in which the next comes.
func (b *inbound) fill(c <-chan mqtt.Message) {
	for len(b.arrived) < maxBatch && b.bytes < maxBatchBytes {
		select {
		case m := <-c:
			b.add(m)
		default:
			return
		}
	}
}
