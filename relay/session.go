package relay

import (
	"context"
	"errors"
	"fmt"
	"runtime/debug"
	"sync"
	"sync/atomic"
	"time"

	"github.com/oklog/run"

	"postrider/internal/mqtt"
	"postrider/internal/record"
	"postrider/outbox"
)

const (
	drainLimit = 512
	firstBytes = 64 << 10 // the window in bytes at the start of a session; it grows with what is acknowledged
	mostBytes  = 8 << 20
	flushAfter = 10 * time.Millisecond // acknowledgements wait this long for company
	gatherFor  = 4 * time.Millisecond  // between looks at an outbox that was empty a moment ago
)

var (
	errPanic = errors.New("panic")
	errLost  = errors.New("connection is gone and says no reason")
	errEnded = errors.New("session ended by itself")
)

// ended is how a session ended.
type ended struct {
	err       error
	fence     int64   // 0: none was taken
	connected bool    // there was one
	progress  bool    // something was acknowledged
	inFlight  []int64 // branches with records published and not acknowledged
	first     string  // the first of these records; "": none
}

// flight is a record under way.
type flight struct {
	shipped  outbox.Shipped
	key      record.BranchKey
	size     int64
	at       time.Time
	delivery mqtt.Delivery
}

// unsent is the delivery of a record that expired or was withheld in its row: nobody waits for its PUBACK.
type unsent struct{}

func (unsent) Done() <-chan struct{} { return alreadyDone }
func (unsent) Error() error          { return nil }

var alreadyDone = func() chan struct{} { c := make(chan struct{}); close(c); return c }()

// session is one connection and what is under way on it. Two goroutines share it: publish hands records to the client,
// settle waits for their PUBACKs in the same order and acknowledges the contiguous prefix.
//
//	outbox.Drain ─▶ publish ─▶ flights ─▶ settle ─▶ outbox.Ack
//	                  ▲  window: records, bytes │
//	                  └───────── room ◀─────────┘
type session struct {
	r         *Relay
	conn      Conn
	fence     int64
	watch     *outbox.Watch
	slots     chan struct{} // one place per record in flight
	flights   chan flight   // in the order of publishing
	bytes     atomic.Int64  // in flight
	window    atomic.Int64  // bytes that may be
	room      chan struct{}
	handed    map[int64]int64 // per branch, the last LSN handed to the client; the publisher's
	acked     atomic.Bool     // something was
	left      map[int64]int64 // per branch, the highest LSN without a PUBACK at the end
	leftFirst *flight         // the first of them

	mu      sync.Mutex
	settled map[int64]int64 // per branch, LSN acknowledged in the outbox since publish last looked
}

// runSession takes the lease, connects and ships until something ends it.
func (r *Relay) runSession(ctx context.Context) ended {
	// The barrier: whatever Drain will see is durable after this commit.
	fence, err := r.box.Lease(ctx, holder())
	if err != nil {
		return ended{err: err}
	}
	conn, err := r.dial(ctx)
	if err != nil {
		return ended{err: err, fence: fence}
	}
	defer conn.Close()
	r.m.sessions.Inc()
	r.m.connected.Set(1)
	defer r.m.connected.Set(0)
	watch, err := r.box.Watch(ctx)
	if err != nil {
		return ended{err: err, fence: fence}
	}
	defer watch.Close()
	if err := r.box.Connected(ctx, fence); err != nil {
		return ended{err: err, fence: fence}
	}
	r.log.Info("connected", "fence", fence)
	s := &session{r: r, conn: conn, fence: fence, watch: watch, slots: make(chan struct{}, r.o.Window), flights: make(chan flight, r.o.Window),
		room: make(chan struct{}, 1), handed: map[int64]int64{}, left: map[int64]int64{}, settled: map[int64]int64{}}
	s.window.Store(firstBytes)
	r.c.connected(s)
	return s.run(ctx)
}

// run ends when its first actor does: the publisher, the settler, the connection, or ctx.
func (s *session) run(ctx context.Context) ended {
	end := ended{fence: s.fence, connected: true}
	var g run.Group
	{ // publisher
		publishing, cancel := context.WithCancel(ctx)
		g.Add(guard(func() error { defer close(s.flights); return s.publish(publishing) }), func(error) { cancel() })
	}
	{ // settler: stays for the grace period after the others, for what is in flight
		stop := make(chan struct{})
		g.Add(guard(func() error { return s.settle(context.WithoutCancel(ctx), stop) }), func(error) { close(stop) })
	}
	{ // connection
		watching, cancel := context.WithCancel(ctx)
		g.Add(guard(func() error {
			select {
			case <-watching.Done():
				return nil
			case <-s.conn.Lost():
			}
			err := s.conn.Err()
			switch {
			case err == nil:
				return errLost
			case errors.Is(err, mqtt.ErrClosed): // by another actor, which has the reason
				<-watching.Done()
				return nil
			}
			return err
		}), func(error) { cancel() })
	}
	if s.r.o.Forward != nil { // forwarder
		forwarding, cancel := context.WithCancel(ctx)
		g.Add(guard(func() error { return s.forward(forwarding) }), func(error) { cancel() })
	}
	end.err = g.Run()
	if end.err == nil {
		if end.err = context.Cause(ctx); end.err == nil {
			end.err = errEnded
		}
	}
	end.progress = s.acked.Load()
	for f := range s.flights { // closed by the publisher
		s.unsettled(f)
	}
	end.first = s.first()
	for branch, lsn := range s.left {
		s.r.sent[branch] = max(s.r.sent[branch], lsn)
		end.inFlight = append(end.inFlight, branch)
	}
	return end
}

// first describes the first record that was left without a PUBACK, for the log: perhaps the broker does not take it.
func (s *session) first() string {
	f := s.leftFirst
	if f == nil {
		return ""
	}
	return fmt.Sprintf("%s/%s record %d, %d bytes", f.key.Tenant, f.key.Run, f.shipped.LSN, f.size)
}

// unsettled notes a record whose PUBACK this session does not wait for any more. It is used by one goroutine at a time.
func (s *session) unsettled(f flight) {
	if s.leftFirst == nil {
		s.leftFirst = &f
	}
	s.left[f.shipped.Branch] = max(s.left[f.shipped.Branch], f.shipped.LSN)
}

// guard turns an actor's panic into its error: it ends the session, not the process.
func guard(actor func() error) func() error {
	return func() (err error) {
		defer func() {
			if p := recover(); p != nil {
				err = fmt.Errorf("%w: %v\n%s", errPanic, p, debug.Stack())
			}
		}()
		return actor()
	}
}

// publish hands pending records to the client, reading one batch ahead. When a rewind has passed, what was read and not
// handed over is given back and read again.
func (s *session) publish(ctx context.Context) error {
	var cursor outbox.Cursor
	ahead := make(chan drained, 1)
	reading := false // one batch ahead; the cursor belongs to that goroutine then
	fetch := func() {
		s.forget(&cursor)
		reading = true
		go func() {
			var d drained
			d.err = guard(func() (err error) {
				d.items, err = s.r.box.Drain(ctx, "", &cursor, drainLimit)
				d.encode(s.r.topics) // here, beside the publisher, whose time is what limits the throughput
				return err
			})()
			ahead <- d
		}()
	}
	wait := func() drained { reading = false; return <-ahead }
	defer func() {
		if reading {
			wait()
		}
	}()
	poll := time.NewTicker(s.r.o.Poll)
	defer poll.Stop()
	// A trickle is read in batches: a look at the outbox for every single commit would take the steps' processor time.
	gather := time.NewTicker(gatherFor)
	defer gather.Stop()
	fetch()
	for {
		s.r.c.published.set()
		batch := wait()
		if batch.err != nil {
			return batch.err
		}
		if len(batch.items) == 0 {
			select {
			case <-ctx.Done():
				return nil
			case <-s.r.bell:
				select {
				case <-ctx.Done():
					return nil
				case <-gather.C:
				}
			case <-poll.C:
			}
			fetch()
			continue
		}
		fetch()
		sent, err := s.send(ctx, batch)
		if err != nil || ctx.Err() != nil {
			return err
		}
		if sent < len(batch.items) {
			following := wait()
			if following.err != nil {
				return following.err
			}
			cursor.Return(append(batch.items[sent:], following.items...))
			fetch()
		}
	}
}

// drained is one answer of Drain, ready to be sent.
type drained struct {
	items []outbox.Item
	wire  []wire // of each item
	err   error
}

type wire struct {
	topic   string
	payload []byte
}

func (d *drained) encode(topics record.Topics) {
	d.wire = make([]wire, len(d.items))
	for i := range d.items {
		it, w := &d.items[i], &d.wire[i]
		w.topic = topics.Of(&it.Record)
		if it.Kind == record.Message {
			w.payload = it.Data
		} else {
			w.payload = it.AppendCloudEvent(make([]byte, 0, len(it.Data)+768))
		}
	}
}

// send hands a batch to the client, each record when the window has room, and says how many. It stops early at the end of
// ctx, and before the first record that it would hand over after a rewind was committed: at most the one being handed over
// passes.
func (s *session) send(ctx context.Context, batch drained) (sent int, err error) {
	for i := range batch.items {
		it, topic, payload := &batch.items[i], batch.wire[i].topic, batch.wire[i].payload
		size := int64(len(payload) + len(topic))
		s.r.c.published.set()
		if !s.waitForRoom(ctx, size) {
			return i, nil
		}
		// Acknowledging moves a mark over everything below it, so nothing may ever be left out.
		if last, ok := s.handed[it.Branch]; ok && it.LSN != last+1 {
			<-s.slots
			return i, fmt.Errorf("record %d of branch %s does not follow record %d", it.LSN, it.Key.Branch, last)
		}
		rewound, err := s.watch.Rewound(ctx)
		if err != nil && ctx.Err() == nil {
			return i, err
		}
		if rewound || ctx.Err() != nil {
			<-s.slots
			return i, nil
		}
		if last, again := s.r.sent[it.Branch]; again {
			if it.LSN <= last {
				s.r.m.redelivered.Inc()
			}
			if it.LSN >= last {
				delete(s.r.sent, it.Branch)
			}
		}
		s.bytes.Add(size)
		s.handed[it.Branch] = it.LSN
		f := flight{shipped: outbox.Shipped{Branch: it.Branch, LSN: it.LSN, Bytes: it.Bytes, Recorded: it.Recorded}, key: it.Key, size: size, at: time.Now()}
		switch {
		case it.Withheld:
			f.delivery = unsent{}
		case s.r.box.Expired(&it.Record):
			f.shipped.Expired, f.delivery = []int64{it.LSN}, unsent{}
		default:
			f.delivery = s.conn.Publish(topic, it.Kind == record.Message && it.Retain, payload)
			s.r.m.published.Inc()
		}
		s.flights <- f // has as many places as there are slots
	}
	return len(batch.items), nil
}

// waitForRoom takes a place in the window, and waits until size bytes more fit into it. It is false at the end of ctx.
func (s *session) waitForRoom(ctx context.Context, size int64) bool {
	full := func() bool { n := s.bytes.Load(); return n > 0 && n+size > s.window.Load() }
	taken := false
	select {
	case s.slots <- struct{}{}:
		taken = true
	default:
	}
	if taken && !full() {
		return true
	}
	s.r.c.waits.Store(true)
	defer func() { s.r.c.published.set(); s.r.c.waits.Store(false) }()
	if !taken {
		select {
		case s.slots <- struct{}{}:
		case <-ctx.Done():
			return false
		}
	}
	for full() {
		select {
		case <-s.room:
		case <-ctx.Done():
			return false
		}
	}
	return true
}

// forget drops the cursor's positions that the shipped marks have reached.
func (s *session) forget(cursor *outbox.Cursor) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for branch, lsn := range s.settled {
		cursor.Settle(branch, lsn)
	}
	clear(s.settled)
}

// settle waits for the PUBACKs in the order of publishing and acknowledges the contiguous prefix, in batches: one is
// flushed when it is full, and when its oldest acknowledgement has waited a while. It ends with the first record that has
// no PUBACK; what was acknowledged before is flushed all the same.
func (s *session) settle(ctx context.Context, stop <-chan struct{}) (err error) {
	b := batch{s: s, marks: map[int64]outbox.Shipped{}}
	defer func() { err = errors.Join(err, b.flush(ctx)) }()
	flush := time.NewTicker(flushAfter)
	defer flush.Stop()
	pace := pace{last: time.Now()}
	var grace <-chan time.Time
	end := func() { // told to stop: what is in flight gets the grace period
		stop = nil
		grace = time.After(s.r.o.Grace)
	}
	for {
		var f flight
		var open bool
		for f.delivery == nil {
			select {
			case f, open = <-s.flights:
				if !open { // the publisher is ending: its reason goes first
					if stop != nil {
						<-stop
					}
					return nil
				}
			case <-flush.C:
				s.r.c.turned.set()
				if err := b.flush(ctx); err != nil {
					return err
				}
			case <-stop:
				end()
			case <-grace:
				return nil
			}
		}
		for done := false; !done; {
			select {
			case <-f.delivery.Done():
				done = true
				continue
			default:
			}
			select {
			case <-f.delivery.Done():
				done = true
			case <-flush.C:
				s.r.c.turned.set()
				if err := b.flush(ctx); err != nil {
					s.unsettled(f)
					return err
				}
				if limit := pace.limit(s.bytes.Load(), s.r.patience); time.Since(later(pace.last, f.at)) > limit {
					s.unsettled(f)
					s.conn.Kill()
					return fmt.Errorf("%w: no PUBACK for %s", mqtt.ErrTimeout, limit.Round(time.Millisecond))
				}
			case <-stop:
				end()
			case <-grace:
				s.unsettled(f)
				return nil
			}
		}
		if err := f.delivery.Error(); err != nil {
			s.unsettled(f)
			return err
		}
		pace.acked(f.size)
		if len(s.flights) == 0 {
			pace.since = time.Time{} // idle time is not slowness
		}
		s.bytes.Add(-f.size)
		s.window.Store(min(s.window.Load()+f.size, mostBytes))
		<-s.slots
		select {
		case s.room <- struct{}{}:
		default:
		}
		if err := b.add(ctx, f.shipped); err != nil {
			return err
		}
	}
}

// batch gathers acknowledgements for one transaction.
type batch struct {
	s     *session
	marks map[int64]outbox.Shipped
	n     int
}

func (b *batch) add(ctx context.Context, shipped outbox.Shipped) error {
	shipped.Expired = append(b.marks[shipped.Branch].Expired, shipped.Expired...)
	b.marks[shipped.Branch] = shipped
	b.n++
	if b.n < b.s.r.o.AckBatch {
		return nil
	}
	return b.flush(ctx)
}

func (b *batch) flush(ctx context.Context) error {
	if b.n == 0 {
		return nil
	}
	list := make([]outbox.Shipped, 0, len(b.marks))
	for _, m := range b.marks {
		list = append(list, m)
	}
	n := b.n
	clear(b.marks)
	b.n = 0
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	if err := b.s.r.box.Ack(ctx, b.s.fence, list); err != nil {
		for _, m := range list {
			b.s.left[m.Branch] = max(b.s.left[m.Branch], m.LSN)
		}
		return err
	}
	b.s.acked.Store(true)
	b.s.r.m.acked.Add(float64(n))
	b.s.r.m.lastAck.SetToCurrentTime()
	b.s.mu.Lock()
	defer b.s.mu.Unlock()
	for _, m := range list {
		b.s.settled[m.Branch] = m.LSN
	}
	return nil
}

// pace measures how fast PUBACKs come, to tell a slow link from a silent broker.
type pace struct {
	last  time.Time // PUBACK
	since time.Time // of the present sample
	bytes int64     // in it
	rate  float64   // bytes per second; 0: not measured yet
}

func (p *pace) acked(n int64) {
	now := time.Now()
	p.last = now
	if p.since.IsZero() {
		p.since = now
		return
	}
	p.bytes += n
	if d := now.Sub(p.since); d > 100*time.Millisecond {
		sample := float64(p.bytes) / d.Seconds()
		if p.rate == 0 {
			p.rate = sample
		}
		p.rate = 0.7*p.rate + 0.3*sample
		p.since, p.bytes = now, 0
	}
}

// limit is how long no PUBACK at all may come with that many bytes in flight.
func (p *pace) limit(inFlight int64, least time.Duration) time.Duration {
	if p.rate == 0 {
		return least
	}
	return max(least, time.Duration(4*float64(inFlight)/p.rate*float64(time.Second)))
}

func later(a, b time.Time) time.Time {
	if a.After(b) {
		return a
	}
	return b
}
