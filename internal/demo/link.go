package demo

import (
	"context"
	"maps"
	"sync"
	"time"

	"postrider/internal/mqtt"
	"postrider/internal/record"
	"postrider/relay"
)

// link is the way from the relay to the broker, and all that goes wrong on it. It is closed at first, then slow, loses
// PUBACKs, makes the relay panic, and stands still before the record from which on it wants a permit for each. Below it is
// the real client. The relay publishes from one goroutine at a time, session after session.
type link struct {
	client mqtt.Options
	opened chan struct{} // closed by open

	plan   plan // from here on the publishing goroutine's
	n      int  // calls of publish
	due    time.Time
	unsaid []mqtt.Delivery // their PUBACKs are kept from the relay

	lost     chan struct{} // closed when the PUBACKs were lost and the connection with them
	panicked chan struct{} // closed before the panic
	permit   chan struct{} // closed: one for all

	mu     sync.Mutex
	atGate string           // branch of the record that waits for a permit; "": none does
	handed map[string]int64 // by branch, the last LSN given to this connection's client
	ever   map[string]int64 // or to any connection's
}

// plan says when, in records published, repeated ones among them.
type plan struct {
	pause    time.Duration // between records
	lose     int           // the first one whose PUBACK is lost
	losses   int           // how many are
	panicAt  int
	permitAt int
}

func newLink(client mqtt.Options) *link {
	return &link{client: client, opened: make(chan struct{}), lost: make(chan struct{}), panicked: make(chan struct{}),
		permit: make(chan struct{}), handed: map[string]int64{}, ever: map[string]int64{}}
}

// open lets records through, as planned.
func (l *link) open(p plan) {
	l.plan = p
	close(l.opened)
}

// gate is the branch of the record that waits for a permit, "": none does. While one does nothing is handed over, and
// handed and ever are all that was: by branch the last LSN, over the present connection and over any.
func (l *link) gate() (branch string, handed, ever map[string]int64) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.atGate, maps.Clone(l.handed), maps.Clone(l.ever)
}

// dial is the relay's.
func (l *link) dial(ctx context.Context) (relay.Conn, error) {
	c, err := mqtt.Dial(ctx, l.client)
	if err != nil {
		return nil, err
	}
	l.note(func() { clear(l.handed) })
	return &conn{c, l, ctx.Done()}, nil
}

// conn is one connection over the link.
type conn struct {
	relay.Conn
	link *link
	end  <-chan struct{} // of the relay
}

// Publish waits as a slow link does, and fails as planned.
func (c *conn) Publish(topic string, retain bool, payload []byte) mqtt.Delivery {
	l := c.link
	if !c.wait(l.opened) || !c.pace() {
		return c.Conn.Publish(topic, retain, payload) // it says what is wrong
	}
	l.n++
	if l.n == l.plan.panicAt {
		close(l.panicked)
		panic("the demo breaks the relay here")
	}
	r, err := record.ParseCloudEvent(payload)
	if err != nil {
		r.Key.Branch = "?" // the fold will say so
	}
	if l.n >= l.plan.permitAt {
		l.note(func() { l.atGate = r.Key.Branch })
		c.wait(l.permit)
	}
	l.note(func() {
		l.atGate, l.handed[r.Key.Branch], l.ever[r.Key.Branch] = "", r.LSN, max(r.LSN, l.ever[r.Key.Branch])
	})
	d := c.Conn.Publish(topic, retain, payload)
	if l.n < l.plan.lose || l.n >= l.plan.lose+l.plan.losses {
		return d
	}
	l.unsaid = append(l.unsaid, d)
	if len(l.unsaid) == l.plan.losses {
		for _, d := range l.unsaid {
			c.wait(d.Done()) // the broker has them, which is the point
		}
		c.Kill()
		close(l.lost)
	}
	return unsaid{c}
}

// wait is false when the connection or the relay has ended.
func (c *conn) wait(ready <-chan struct{}) bool {
	select {
	case <-ready:
	case <-c.Lost():
	case <-c.end:
	}
	return !closed(c.Lost()) && !closed(c.end)
}

// pace keeps to the plan's pause between records; a delay is made up for within reason.
func (c *conn) pace() bool {
	l, at := c.link, time.Now()
	if l.due = l.due.Add(l.plan.pause); at.Sub(l.due) > 50*time.Millisecond {
		l.due = at
	}
	ready := make(chan struct{})
	t := time.AfterFunc(l.due.Sub(at), func() { close(ready) })
	defer t.Stop()
	return c.wait(ready)
}

func (l *link) note(change func()) {
	l.mu.Lock()
	defer l.mu.Unlock()
	change()
}

// unsaid is the delivery of a record whose PUBACK is lost: it is done only when the connection is gone.
type unsaid struct{ c *conn }

func (u unsaid) Done() <-chan struct{} { return u.c.Lost() }

func (u unsaid) Error() error {
	if err := u.c.Err(); err != nil {
		return err
	}
	return mqtt.ErrInFlight
}
