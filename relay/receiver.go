package relay

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"time"

	"github.com/oklog/run"
	"github.com/prometheus/client_golang/prometheus"

	"postrider/internal/mqtt"
	"postrider/internal/record"
	"postrider/outbox"
)

const (
	inboundBuffer = 128     // messages between network and commit; each may be as large as the broker lets through
	inboundBatch  = 256     // messages of one commit
	inboundBytes  = 8 << 20 // of payloads, but for the last one
	firstPause    = 20 * time.Millisecond
	longestPause  = time.Second
)

// Receive takes inputs in, all or none, and says what became of each. After nil they are durable and may be acknowledged;
// an error is for what may succeed later: what can be no input is a dead letter.
type Receive func(ctx context.Context, in []record.Inbound) ([]record.Outcome, error)

// ReceiverOptions of NewReceiver; the zero value works.
type ReceiverOptions struct {
	KeepFor    time.Duration // how long a failing commit is tried again before the connection is renewed; 0: 5 s
	BackoffMin time.Duration // between sessions; 0: 0.2 s
	BackoffMax time.Duration // 0: 30 s
	Grace      time.Duration // at the end, for the commit in hand; 0: 1 s
	Logger     *slog.Logger
	Metrics    prometheus.Registerer // nil: none
}

// Receiver takes inputs from a broker. It has a connection and a kept session of its own: a client id that publishes as well
// would lose messages. A message is acknowledged after its input is committed, in the order of arrival; until then the
// broker keeps it and sends it again. A Relay runs it while it holds the lock of the database, beside its sessions: one
// failing does not stop the other.
//
// It subscribes when the broker has no session, or one that perhaps does not have all of its filters: then retained messages
// come again. A broker that is away is no reason; one that ends a connection instead of answering the CONNECT is, since it
// may have made an empty session of it.
type Receiver struct {
	box     *outbox.Outbox
	inlets  *record.Inlets
	broker  mqtt.Options
	receive Receive
	o       ReceiverOptions
	log     *slog.Logger
	sub     mqtt.Subscription
	host    string   // of the broker, in table subscription
	dropped []string // filters that the kept session may still have
	known   bool     // dropped was read
	said    saidOnce
	c       inboundCondition

	connected prometheus.Gauge
	messages  *prometheus.CounterVec
	unmatched prometheus.Counter
}

// NewReceiver returns a receiver of what comes on the topics of inlets, which Check has passed. The broker's client id must
// be no publisher's.
func NewReceiver(box *outbox.Outbox, inlets *record.Inlets, broker mqtt.Options, receive Receive, o ReceiverOptions) *Receiver {
	if o.KeepFor == 0 {
		o.KeepFor = 5 * time.Second
	}
	if o.BackoffMin == 0 {
		o.BackoffMin = 200 * time.Millisecond
	}
	if o.BackoffMax == 0 {
		o.BackoffMax = 30 * time.Second
	}
	if o.Grace == 0 {
		o.Grace = time.Second
	}
	if o.Logger == nil {
		o.Logger = slog.New(slog.DiscardHandler)
	}
	host := ""
	if u, err := mqtt.ParseBroker(broker.Broker); err == nil { // else no session ever comes about
		host = u.Host
	}
	v := &Receiver{
		host: host,
		box:  box, inlets: inlets, broker: broker, receive: receive, o: o, log: o.Logger.With("component", "receiver"),
		sub:       mqtt.Subscription{Filters: inlets.Filters(), Buffer: inboundBuffer},
		connected: prometheus.NewGauge(prometheus.GaugeOpts{Name: "postrider_inbound_connected", Help: "1 while inputs are subscribed at the broker."}),
		messages: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "postrider_inbound_messages_total",
			Help: "Inputs made of messages, once for each agent that gets one, by what became of them; unmatched: of none, the message was dropped.",
		}, []string{"outcome"}),
	}
	for _, outcome := range []record.Outcome{record.Stored, record.Duplicate, record.Conflict, record.DeadInput} {
		v.messages.WithLabelValues(string(outcome))
	}
	v.sub.Connecting = func(ctx context.Context) error {
		v.sub.Resume = false
		return box.Connecting(ctx, host)
	}
	v.unmatched = v.messages.WithLabelValues("unmatched")
	if o.Metrics != nil {
		o.Metrics.MustRegister(v.connected, v.messages)
	}
	return v
}

// errStore is a commit that did not succeed for KeepFor: of this side, no broker's fault.
var errStore = errors.New("inputs cannot be stored")

// run keeps one session at a time until ctx ends, whatever goes wrong in it.
func (v *Receiver) run(ctx context.Context) {
	v.c.run(true)
	defer v.c.run(false)
	for failures := 0; ctx.Err() == nil; failures++ {
		v.c.turned.set()
		progress := false
		err := guard(func() error { return v.session(ctx, &progress) })()
		if ctx.Err() != nil {
			return
		}
		if err == nil {
			err = errEnded
		}
		if progress {
			failures = 0
		}
		pause := backoff(v.o.BackoffMin, v.o.BackoffMax, failures)
		v.c.ended(err, progress, pause)
		if reason := reasonOf(err); v.said.due(reason) {
			level := slog.LevelWarn // brokers come back
			if errors.Is(err, errPanic) || errors.Is(err, errStore) {
				level = slog.LevelError
			}
			v.log.Log(ctx, level, "inputs are not received; they wait at the broker", "reason", reason, "err", err, "next_in", pause.Round(time.Millisecond))
		}
		t := time.NewTimer(pause)
		select {
		case <-ctx.Done():
		case <-t.C:
		}
		t.Stop()
	}
}

// session is one connection.
func (v *Receiver) session(ctx context.Context, progress *bool) error {
	if !v.known {
		dropped, granted, err := v.box.Subscribing(ctx, v.host, v.sub.Filters)
		if err != nil {
			return err
		}
		v.dropped, v.known, v.sub.Resume = dropped, true, granted
	}
	resume := v.sub.Resume
	conn, err := mqtt.Subscribe(ctx, v.broker, v.sub)
	if refused := (*mqtt.RefusedError)(nil); resume && errors.As(err, &refused) { // the broker looked at no session
		v.sub.Resume = true
		return errors.Join(err, v.subscribed(ctx))
	}
	if err != nil {
		return err
	}
	defer conn.Close()
	// Without the SUBACK nobody knows what the session has, and the next connection subscribes again.
	defer func() { v.sub.Resume = conn.Confirmed() }()
	v.connected.Set(1)
	defer v.connected.Set(0)
	up := time.Now()
	defer func() { *progress = *progress || time.Since(up) > goodSession }()
	v.c.connected()
	if conn.Confirmed() {
		if err := v.subscribed(ctx); err != nil {
			return err
		}
	}
	if resume && !conn.SessionPresent() {
		v.log.Warn("the broker did not keep the session of this node's inputs; what was sent meanwhile is lost")
	}
	v.log.Info("inputs are subscribed", "client_id", v.broker.ClientID, "filters", len(v.sub.Filters), "session_kept", conn.SessionPresent())

	var g run.Group
	{ // takes in what comes
		ctx, cancel := context.WithCancel(ctx)
		g.Add(guard(func() error { return v.consume(ctx, conn, progress) }), func(error) { cancel() })
	}
	{ // drops what is not wanted any more: the answer comes behind messages, which somebody must take meanwhile
		ctx, cancel := context.WithCancel(ctx)
		g.Add(guard(func() error {
			err := v.unsubscribe(ctx, conn)
			if err == nil {
				<-ctx.Done()
			}
			return err
		}), func(error) { cancel() })
	}
	return g.Run()
}

// subscribed records that the session has all filters, also at the end of ctx: else the next process subscribes again.
func (v *Receiver) subscribed(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), v.o.KeepFor)
	defer cancel()
	return v.box.Subscribed(ctx, v.host, v.sub.Filters)
}

func (v *Receiver) unsubscribe(ctx context.Context, conn *mqtt.Subscriber) error {
	if len(v.dropped) == 0 {
		return nil
	}
	if conn.SessionPresent() {
		if err := conn.Unsubscribe(ctx, v.dropped...); err != nil {
			return err
		}
	}
	if err := v.box.Unsubscribed(ctx, v.host, v.dropped); err != nil {
		return err
	}
	v.log.Info("subscriptions are dropped", "filters", len(v.dropped))
	v.dropped = nil
	return nil
}

// consume commits what comes in batches, and acknowledges each after its commit. An error leaves what is not acknowledged
// to be sent again.
func (v *Receiver) consume(ctx context.Context, conn *mqtt.Subscriber, progress *bool) error {
	turn := time.NewTicker(time.Second)
	defer turn.Stop()
	for {
		var b arrivals
		select {
		case <-turn.C:
			v.c.turned.set()
			continue
		case m := <-conn.C():
			b.add(v, m)
		case <-conn.Lost():
		case <-ctx.Done():
			return context.Cause(ctx)
		}
		select {
		case <-conn.Lost(): // what was taken comes again: without an id, as another input
			return conn.Err()
		default:
		}
		b.fill(v, conn.C())
		if len(b.in) > 0 {
			if err := v.commit(ctx, conn, b.in); err != nil {
				return err
			}
		}
		for _, ack := range b.acks {
			ack()
		}
		*progress = true
	}
}

// arrivals is a batch and the acknowledgements it owes.
type arrivals struct {
	in    []record.Inbound
	acks  []func()
	bytes int
}

func (b *arrivals) add(v *Receiver, m mqtt.Message) {
	in := v.inlets.Decode(m.Topic, m.Payload, m.Retained)
	if len(in) == 0 { // of a filter that another configuration left behind
		v.unmatched.Inc()
		if v.said.due("unmatched") {
			v.log.Warn("a message came on a topic that nobody subscribed to; it is dropped", "topic", cut(m.Topic))
		}
	}
	b.in = append(b.in, in...)
	b.acks = append(b.acks, m.Ack)
	b.bytes += len(m.Payload)
}

// fill takes what has come meanwhile and waits for nothing: the commit of one batch is the time in which the next comes.
func (b *arrivals) fill(v *Receiver, c <-chan mqtt.Message) {
	for len(b.acks) < inboundBatch && b.bytes < inboundBytes {
		select {
		case m := <-c:
			b.add(v, m)
		default:
			return
		}
	}
}

// commit hands inputs to Receive until it takes them, for KeepFor at most: a lock is given back, a disk may get room. The end
// of ctx leaves it Grace: raw inputs that are committed and not acknowledged come twice.
func (v *Receiver) commit(ctx context.Context, conn *mqtt.Subscriber, in []record.Inbound) error {
	working, cancel := context.WithCancel(context.WithoutCancel(ctx))
	defer cancel()
	defer context.AfterFunc(ctx, func() {
		grace := time.NewTimer(v.o.Grace)
		defer grace.Stop()
		select {
		case <-working.Done():
		case <-grace.C:
			cancel()
		}
	})()
	began := time.Now()
	for pause := firstPause; ; pause = min(2*pause, longestPause) {
		v.c.turned.set()
		outcomes, err := v.receive(working, in)
		if err == nil {
			v.c.stored(nil)
			for _, o := range outcomes {
				v.messages.WithLabelValues(string(o)).Inc()
			}
			return nil
		}
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		v.c.stored(err)
		if time.Since(began) > v.o.KeepFor {
			return fmt.Errorf("%w: %w", errStore, err)
		}
		if v.said.due("store") {
			v.log.Warn("inputs cannot be stored; they are kept and tried again", "inputs", len(in), "err", err)
		}
		t := time.NewTimer(pause)
		select {
		case <-t.C:
		case <-conn.Lost():
			t.Stop()
			return conn.Err()
		case <-ctx.Done():
			t.Stop()
			return context.Cause(ctx)
		}
	}
}

// inboundCondition is how a Receiver is doing, for Health.
type inboundCondition struct {
	turned stamp

	mu      sync.Mutex
	running bool
	up      bool  // subscribed
	refused error // why the commit in hand fails; nil: it does not
	failed  error // why the last session ended
	since   time.Time
	next    time.Time // when the next one begins
}

func (c *inboundCondition) set(change func()) {
	c.mu.Lock()
	defer c.mu.Unlock()
	change()
}

func (c *inboundCondition) run(on bool) { c.set(func() { c.running = on }) }
func (c *inboundCondition) connected()  { c.set(func() { c.up = true }) }

// stored notes that a commit failed, or succeeded.
func (c *inboundCondition) stored(err error) {
	c.set(func() {
		switch {
		case err == nil:
			c.failed = nil
		case c.refused == nil && !errors.Is(c.failed, errStore):
			c.since = time.Now()
		}
		c.refused = err
	})
}

// ended notes that a session is over, and why. Progress forgets the failures before.
func (c *inboundCondition) ended(err error, progress bool, pause time.Duration) {
	c.set(func() {
		now := time.Now()
		if c.failed == nil && c.refused == nil || progress || c.up && !errors.Is(err, errStore) {
			c.since = now
		}
		c.up, c.refused, c.failed, c.next = false, nil, err, now.Add(pause)
	})
}

// Health says in one line why inputs do not come in, "" if they do, and fails when the receiver itself does not go on. A
// broker that is away and a database that takes nothing are trouble and no failure: the inputs wait at the broker.
func (v *Receiver) Health() (trouble string, err error) {
	v.c.mu.Lock()
	defer v.c.mu.Unlock()
	line := func(what string, since time.Time, err error) string {
		why, _, _ := strings.Cut(err.Error(), "\n") // a panic has its stack behind it
		return fmt.Sprintf("%s since %s: %s", what, since.UTC().Format(time.RFC3339), cut(why))
	}
	switch still := v.c.turned.age(); {
	case !v.c.running:
		return "not subscribed: this process does not hold the lock of the relay", nil
	case still > stuckAfter:
		return "", fmt.Errorf("the receiver did nothing for %s", still.Round(time.Second))
	case v.c.refused != nil:
		return line("inputs cannot be stored", v.c.since, v.c.refused), nil
	case v.c.up && errors.Is(v.c.failed, errStore):
		return line("no input was stored", v.c.since, v.c.failed), nil
	case v.c.up:
		return "", nil
	case v.c.failed == nil:
		return "not subscribed yet", nil
	}
	return line("not subscribed", v.c.since, v.c.failed) + "; next try " + v.c.next.UTC().Format(time.RFC3339), nil
}
