// Package relay ships committed records from the outbox to the broker, at least once and in order. Run supervises one
// session at a time: it ends on any error or panic and starts again after a pause, and nothing of that reaches the
// executor, which only rings Notify. A session is one connection: it drains the outbox, publishes within a window, and
// moves the shipped marks only for records whose PUBACK came on this very connection. The outbox is the only queue, the
// supervisor the only reconnector. Exclusion is an OS lock on a file beside the database; every write names the fence of
// the session's lease, so that a stale relay changes nothing.
package relay

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"os"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"postrider/internal/mqtt"
	"postrider/internal/record"
	"postrider/outbox"
)

// Conn is one connection to a broker. *mqtt.Client is one; tests have others.
type Conn interface {
	// Publish sends at QoS 1 and does not wait for the PUBACK. The payload belongs to the connection until then.
	Publish(topic string, retain bool, payload []byte) mqtt.Delivery
	Lost() <-chan struct{} // closed when the connection is gone
	Err() error            // why
	Close()                // orderly and bounded
	Kill()                 // at once
}

// Options of New; the zero value works.
type Options struct {
	Window     int           // records in flight; 0: 1024
	AckBatch   int           // records per acknowledging transaction; 0: 1024
	Poll       time.Duration // how often the outbox is looked at without a Notify; 0: 200 ms
	BackoffMin time.Duration // between sessions; 0: 0.2 s
	BackoffMax time.Duration // 0: 30 s
	AckTimeout time.Duration // without any PUBACK, at least; 0: 3 s
	Grace      time.Duration // at the end, for PUBACKs of what is in flight; 0: 1 s
	Logger     *slog.Logger
	Metrics    prometheus.Registerer // nil: none
	Forward    Forward               // nil: nothing is forwarded
	Receiver   *Receiver             // runs while Run holds the lock; nil: nothing is received
}

// Relay is the relay of one database.
type Relay struct {
	box      *outbox.Outbox
	topics   record.Topics
	dial     func(context.Context) (Conn, error)
	o        Options
	log      *slog.Logger
	m        *metrics
	bell     chan struct{}
	patience time.Duration   // without any PUBACK; doubles with every session that ended for that and saw none
	sent     map[int64]int64 // per branch, the highest LSN that ended sessions published and did not see acknowledged
	said     saidOnce
	forwards forwards
	c        condition
}

// New returns a relay that ships box's records over connections made by dial, while it keeps other relays away.
func New(box *outbox.Outbox, topics record.Topics, dial func(context.Context) (Conn, error), o Options) *Relay {
	if o.Window == 0 {
		o.Window = 1024
	}
	if o.AckBatch == 0 {
		o.AckBatch = 1024
	}
	if o.Poll == 0 {
		o.Poll = 200 * time.Millisecond
	}
	if o.BackoffMin == 0 {
		o.BackoffMin = 200 * time.Millisecond
	}
	if o.BackoffMax == 0 {
		o.BackoffMax = 30 * time.Second
	}
	if o.AckTimeout == 0 {
		o.AckTimeout = 3 * time.Second
	}
	if o.Grace == 0 {
		o.Grace = time.Second
	}
	if o.Logger == nil {
		o.Logger = slog.New(slog.DiscardHandler)
	}
	return &Relay{box: box, topics: topics, dial: dial, o: o, log: o.Logger.With("component", "relay"),
		m: newMetrics(o.Metrics), bell: make(chan struct{}, 1), patience: o.AckTimeout, sent: map[int64]int64{},
		forwards: forwards{bell: make(chan struct{}, 1)}}
}

// Notify has the relay look at the outbox, and at what is to be forwarded, now. It does no I/O, never blocks, and may be
// lost: the poll alone suffices.
func (r *Relay) Notify() {
	for _, bell := range [...]chan struct{}{r.bell, r.forwards.bell} {
		select {
		case bell <- struct{}{}:
		default:
		}
	}
}

// Run ships until ctx ends, and returns nil. Sessions end and start again inside it. The lock is kept between them, so
// that another relay of this database is refused and names this one; as long as it is, the receiver runs.
func (r *Relay) Run(ctx context.Context) error {
	var release func() error // of the lock
	stopReceiver := func() {}
	defer func() {
		stopReceiver()
		if release != nil {
			if err := release(); err != nil {
				r.log.Warn("lock could not be released", "err", err)
			}
		}
	}()
	for failures := 0; ctx.Err() == nil; failures++ {
		r.c.turned.set()
		var end ended
		if release == nil {
			if release, end.err = r.box.Exclude(holder()); release != nil && r.o.Receiver != nil {
				stopReceiver = r.startReceiver(ctx)
			}
		}
		began := time.Now()
		if release != nil {
			if err := guard(func() error { end = r.runSession(ctx); return nil })(); err != nil {
				end.err = err
			}
		}
		if ctx.Err() != nil {
			break
		}
		if end.progress || end.connected && time.Since(began) > goodSession {
			failures = 0
		}
		pause := backoff(r.o.BackoffMin, r.o.BackoffMax, failures)
		reason := reasonOf(end.err)
		r.c.ended(end, reason == "other" || reason == "panic", pause)
		switch {
		case end.progress:
			r.patience = r.o.AckTimeout
		case reason == "timeout":
			// Perhaps no silent broker but a link on which one large record takes this long.
			r.patience = min(2*r.patience, 2*time.Minute)
		}
		r.m.restarts.WithLabelValues(reason).Inc()
		log := r.log.With("reason", reason, "err", end.err, "next_in", pause.Round(time.Millisecond))
		switch {
		case !r.said.due(reason):
		case reason == "locked":
			r.log.Info("another relay ships the records of this database; this one waits", "err", end.err)
		case end.connected:
			log.Warn("session ended; records wait in the outbox", "first_in_flight", end.first)
		default:
			log.Warn("no session with the broker; records wait in the outbox")
		}
		if end.fence != 0 {
			if err := r.box.Failed(ctx, end.fence, end.inFlight, cut(end.err.Error()), time.Now().Add(pause)); err != nil && ctx.Err() == nil {
				r.log.Warn("failure could not be recorded", "err", err)
			}
		}
		t := time.NewTimer(pause)
		select {
		case <-ctx.Done():
		case <-t.C:
		}
		t.Stop()
	}
	return nil
}

// startReceiver runs the receiver until the end of ctx, or until stop is called, which waits for its end.
func (r *Relay) startReceiver(ctx context.Context) (stop func()) {
	ctx, cancel := context.WithCancel(ctx)
	done := make(chan struct{})
	go func() {
		defer close(done)
		r.o.Receiver.run(ctx)
	}()
	return func() { cancel(); <-done }
}

func holder() string {
	host, err := os.Hostname()
	if err != nil {
		host = "?"
	}
	return fmt.Sprintf("%d@%s", os.Getpid(), host)
}

// goodSession is how long a connection lasts that shows that all is well, also when there was nothing to do: what ends it is
// a first failure.
const goodSession = 5 * time.Second

// backoff doubles from least with the failures so far (from 0) up to most, with full jitter.
func backoff(least, most time.Duration, failures int) time.Duration {
	d := most
	if failures < 32 && least<<failures > 0 {
		d = min(most, least<<failures)
	}
	return rand.N(d) + 1
}

// saidOnce lets one log line a minute through for what repeats.
type saidOnce struct {
	mu sync.Mutex
	at map[string]time.Time
}

func (s *saidOnce) due(what string) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if time.Since(s.at[what]) < time.Minute {
		return false
	}
	if s.at == nil {
		s.at = map[string]time.Time{}
	}
	s.at[what] = time.Now()
	return true
}

// cut bounds what a broker's or a driver's words may take in the database.
func cut(s string) string {
	if len(s) > 1024 {
		return s[:1024]
	}
	return s
}

// reasonOf sorts the ends of sessions into the closed set of a metric's label.
func reasonOf(err error) string {
	var refused *mqtt.RefusedError
	switch {
	case errors.As(err, &refused):
		return "refused"
	case errors.Is(err, errPanic):
		return "panic"
	case errors.Is(err, outbox.ErrLocked):
		return "locked"
	case errors.Is(err, outbox.ErrFenced):
		return "fenced"
	case errors.Is(err, mqtt.ErrUnreachable):
		return "unreachable"
	case errors.Is(err, mqtt.ErrTimeout):
		return "timeout"
	case errors.Is(err, mqtt.ErrProtocol):
		return "protocol"
	case errors.Is(err, mqtt.ErrPeerClosed):
		return "closed"
	}
	return "other"
}

type metrics struct {
	connected                               prometheus.Gauge
	lastAck                                 prometheus.Gauge
	sessions, published, acked, redelivered prometheus.Counter
	restarts                                *prometheus.CounterVec
}

func newMetrics(reg prometheus.Registerer) *metrics {
	gauge := func(name, help string) prometheus.Gauge {
		return prometheus.NewGauge(prometheus.GaugeOpts{Name: "postrider_relay_" + name, Help: help})
	}
	counter := func(name, help string) prometheus.Counter {
		return prometheus.NewCounter(prometheus.CounterOpts{Name: "postrider_relay_" + name, Help: help})
	}
	m := &metrics{
		connected:   gauge("connected", "1 while a session has a connection."),
		lastAck:     gauge("last_ack_timestamp_seconds", "When the last PUBACK was committed to the outbox; 0: none yet."),
		sessions:    counter("sessions_total", "Connections that were established."),
		published:   counter("published_total", "Records handed to the MQTT client, repeated ones among them."),
		acked:       counter("acked_total", "Records acknowledged in the outbox after their PUBACK."),
		redelivered: counter("redelivered_total", "Records published again because an earlier session did not see their PUBACK."),
		restarts: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "postrider_relay_restarts_total", Help: "Sessions that ended without being told to, by reason.",
		}, []string{"reason"}),
	}
	for _, reason := range []string{"refused", "panic", "locked", "fenced", "unreachable", "timeout", "protocol", "closed", "other"} {
		m.restarts.WithLabelValues(reason)
	}
	if reg != nil {
		reg.MustRegister(m.connected, m.lastAck, m.sessions, m.published, m.acked, m.redelivered, m.restarts)
	}
	return m
}
